/* Owns nothing but the shared rules' numbers: builds the forms of JSON that schemas are made of.
 *
 * Invariant: no form takes the empty text, and none allows two spaces in a row. */
#include "text/jsonform.h"

#include "text/rawform.h"
#include "text/values.h"

enum { JSONFORM_DIGITS = 17 /* behind the first one, and of a fraction: 64-bit readers fit */ };

/* One optional space. Returns the node behind it. */
uint32_t jsonform_space(struct automaton *a, uint32_t from)
{
    uint32_t to = automaton_add_node(a);
    automaton_add_byte(a, from, to, ' ', ' ');
    automaton_add_empty(a, from, to);
    return to;
}

uint32_t jsonform_step(struct automaton *a, uint32_t from, uint8_t lo, uint8_t hi)
{
    uint32_t to = automaton_add_node(a);
    automaton_add_byte(a, from, to, lo, hi);
    return to;
}

static void jsonform_hex(struct automaton *a, uint32_t from, uint32_t to)
{
    automaton_add_byte(a, from, to, '0', '9');
    automaton_add_byte(a, from, to, 'a', 'f');
    automaton_add_byte(a, from, to, 'A', 'F');
}

/* The characters of a JSON string but for the plain ASCII ones: UTF-8 sequences and escapes, the
 * escapes of surrogates in pairs. */
static uint32_t jsonform_character(struct jsonform *b)
{
    struct automaton *a = b->a;
    if (b->character)
        return b->character - 1;
    uint32_t rule = automaton_add_rule(a);
    b->character = rule + 1;
    uint32_t start = a->rules[rule].start, end = a->rules[rule].end;
    a->nodes[start].text = AUTOMATON_JSON_TEXT;
    automaton_add_points(a, start, end, 0x80, 0x10ffff);
    uint32_t slash = jsonform_step(a, start, '\\', '\\');
    for (const char *p = "\"\\/bfnrt"; *p; p++)
        automaton_add_byte(a, slash, end, (uint8_t)*p, (uint8_t)*p);
    uint32_t u = jsonform_step(a, slash, 'u', 'u');
    uint32_t two = automaton_add_node(a), one = automaton_add_node(a), d = automaton_add_node(a);
    uint32_t three = automaton_add_node(a);
    /* \u0000 is left out: most readers of JSON refuse it. */
    automaton_add_byte(a, u, three, '1', '9');
    automaton_add_byte(a, u, three, 'a', 'c');
    automaton_add_byte(a, u, three, 'A', 'C');
    automaton_add_byte(a, u, three, 'e', 'f');
    automaton_add_byte(a, u, three, 'E', 'F');
    jsonform_hex(a, three, two);
    jsonform_hex(a, two, one);
    jsonform_hex(a, one, end);
    uint32_t zero = jsonform_step(a, u, '0', '0'), zero2 = jsonform_step(a, zero, '0', '0');
    automaton_add_byte(a, zero, two, '1', '9');
    automaton_add_byte(a, zero, two, 'a', 'f');
    automaton_add_byte(a, zero, two, 'A', 'F');
    uint32_t zero3 = jsonform_step(a, zero2, '0', '0');
    automaton_add_byte(a, zero2, one, '1', '9');
    automaton_add_byte(a, zero2, one, 'a', 'f');
    automaton_add_byte(a, zero2, one, 'A', 'F');
    automaton_add_byte(a, zero3, end, '1', '9');
    automaton_add_byte(a, zero3, end, 'a', 'f');
    automaton_add_byte(a, zero3, end, 'A', 'F');
    automaton_add_byte(a, u, d, 'd', 'd');
    automaton_add_byte(a, u, d, 'D', 'D');
    automaton_add_byte(a, d, two, '0', '7');
    uint32_t high = automaton_add_node(a), high2 = automaton_add_node(a);
    automaton_add_byte(a, d, high, '8', '9');
    automaton_add_byte(a, d, high, 'a', 'b');
    automaton_add_byte(a, d, high, 'A', 'B');
    jsonform_hex(a, high, high2);
    uint32_t high3 = automaton_add_node(a);
    jsonform_hex(a, high2, high3);
    uint32_t low = automaton_add_text(a, high3, "\\u"), low2 = automaton_add_node(a);
    automaton_add_byte(a, low, low2, 'd', 'd');
    automaton_add_byte(a, low, low2, 'D', 'D');
    uint32_t low3 = automaton_add_node(a);
    automaton_add_byte(a, low2, low3, 'c', 'f');
    automaton_add_byte(a, low2, low3, 'C', 'F');
    automaton_add_empty(a, low3, two);
    return rule;
}

static void jsonform_plain(struct automaton *a, uint32_t from, uint32_t to)
{
    automaton_add_byte(a, from, to, 0x20, '"' - 1);
    automaton_add_byte(a, from, to, '"' + 1, '\\' - 1);
    automaton_add_byte(a, from, to, '\\' + 1, 0x7f);
}

/* From the opening quote's far side to `end`, min..max characters (max < 0: any number). */
void jsonform_string_body(struct jsonform *b, uint32_t from, uint32_t end, long min, long max)
{
    struct automaton *a = b->a;
    uint32_t character = jsonform_character(b);
    if (b->no_tags) {
        rawform_add_plain(a, from, end, min, max, character);
        return;
    }
    for (long i = 0;; i++) {
        bool last = max < 0 ? i >= min : i == max;
        a->nodes[from].text = max < 0 || i < max ? AUTOMATON_JSON_TEXT : AUTOMATON_NO_TEXT;
        a->nodes[from].room = max < 0 ? AUTOMATON_ANY_ROOM : (uint32_t)(max - i);
        if (i >= min)
            automaton_add_byte(a, from, end, '"', '"');
        if (last && max >= 0)
            break;
        uint32_t to = last ? from : automaton_add_node(a);
        jsonform_plain(a, from, to);
        automaton_add_call(a, from, to, character);
        if (last)
            break;
        from = to;
    }
}

uint32_t jsonform_string(struct jsonform *b)
{
    if (!b->string) {
        uint32_t rule = automaton_add_rule(b->a);
        b->string = rule + 1;
        uint32_t body = jsonform_step(b->a, b->a->rules[rule].start, '"', '"');
        jsonform_string_body(b, body, b->a->rules[rule].end, 0, -1);
    }
    return b->string - 1;
}

/* One to `most` digits, the last at `end`. */
static void jsonform_digits(struct automaton *a, uint32_t from, uint32_t end, int most)
{
    for (int i = 0; i < most; i++) {
        from = jsonform_step(a, from, '0', '9');
        automaton_add_empty(a, from, end);
    }
}

uint32_t jsonform_number(struct jsonform *b, bool whole, bool positive)
{
    struct automaton *a = b->a;
    uint32_t rule = automaton_add_rule(a), end = a->rules[rule].end;
    uint32_t first = automaton_add_node(a), integer = automaton_add_node(a);
    automaton_add_empty(a, a->rules[rule].start, first);
    if (!positive)
        automaton_add_byte(a, a->rules[rule].start, first, '-', '-');
    automaton_add_byte(a, first, integer, '0', '0');
    uint32_t more = jsonform_step(a, first, '1', '9');
    automaton_add_empty(a, more, integer);
    jsonform_digits(a, more, integer, JSONFORM_DIGITS);
    automaton_add_empty(a, integer, end);
    if (whole)
        return rule;
    uint32_t fraction = automaton_add_node(a), e = automaton_add_node(a);
    jsonform_digits(a, jsonform_step(a, integer, '.', '.'), fraction, JSONFORM_DIGITS);
    automaton_add_empty(a, fraction, end);
    for (int i = 0; i < 2; i++) {
        automaton_add_byte(a, i ? integer : fraction, e, 'e', 'e');
        automaton_add_byte(a, i ? integer : fraction, e, 'E', 'E');
    }
    uint32_t digits = automaton_add_node(a);
    automaton_add_empty(a, e, digits);
    automaton_add_byte(a, e, digits, '+', '+');
    automaton_add_byte(a, e, digits, '-', '-');
    jsonform_digits(a, digits, end, 2);
    return rule;
}

/* Numbers low..high of as many digits as `unit`, a power of ten, has. */
static void jsonform_same_length(struct automaton *a, uint32_t from, uint32_t end, int64_t low,
                                 int64_t high, int64_t unit)
{
    int64_t first = low / unit, last = high / unit;
    if (unit == 1) {
        automaton_add_byte(a, from, end, (uint8_t)('0' + first), (uint8_t)('0' + last));
        return;
    }
    if (first == last) {
        uint32_t next = jsonform_step(a, from, (uint8_t)('0' + first), (uint8_t)('0' + first));
        jsonform_same_length(a, next, end, low % unit, high % unit, unit / 10);
        return;
    }
    if (low % unit) {
        uint32_t next = jsonform_step(a, from, (uint8_t)('0' + first), (uint8_t)('0' + first));
        jsonform_same_length(a, next, end, low % unit, unit - 1, unit / 10);
        first++;
    }
    if (high % unit != unit - 1) {
        uint32_t next = jsonform_step(a, from, (uint8_t)('0' + last), (uint8_t)('0' + last));
        jsonform_same_length(a, next, end, 0, high % unit, unit / 10);
        last--;
    }
    if (first <= last) {
        uint32_t next = jsonform_step(a, from, (uint8_t)('0' + first), (uint8_t)('0' + last));
        jsonform_same_length(a, next, end, 0, unit - 1, unit / 10);
    }
}

void jsonform_range(struct automaton *a, uint32_t from, uint32_t end, int64_t low, int64_t high)
{
    if (low < 0)
        jsonform_range(a, jsonform_step(a, from, '-', '-'), end, high < 0 ? -high : 1, -low);
    for (int64_t unit = 1; unit <= JSONFORM_MAX; unit *= 10) {
        int64_t least = unit == 1 ? 0 : unit, most = unit * 10 - 1;
        least = low > least ? low : least;
        most = high < most ? high : most;
        if (least <= most)
            jsonform_same_length(a, from, end, least, most, unit);
    }
}

/* Members "key": value after `from` (behind '{' or ','), each of rule `value`, until '}'. */
void jsonform_members(struct jsonform *b, uint32_t key, uint32_t end, uint32_t value)
{
    struct automaton *a = b->a;
    uint32_t colon = automaton_add_node(a), done = automaton_add_node(a);
    automaton_add_call(a, key, colon, jsonform_string(b));
    uint32_t at = jsonform_space(a, jsonform_step(a, colon, ':', ':'));
    automaton_add_call(a, at, done, value);
    automaton_add_empty(a, jsonform_space(a, jsonform_step(a, done, ',', ',')), key);
    automaton_add_byte(a, done, end, '}', '}');
}

uint32_t jsonform_free_object(struct jsonform *b)
{
    if (!b->object) {
        uint32_t rule = automaton_add_rule(b->a);
        b->object = rule + 1;
        uint32_t open = jsonform_step(b->a, b->a->rules[rule].start, '{', '{');
        automaton_add_byte(b->a, open, b->a->rules[rule].end, '}', '}');
        uint32_t key = automaton_add_node(b->a);
        automaton_add_empty(b->a, open, key);
        jsonform_members(b, key, b->a->rules[rule].end, jsonform_any(b));
    }
    return b->object - 1;
}

/* Items of rule `item` between brackets; max < 0: any number. */
void jsonform_items(struct jsonform *b, uint32_t from, uint32_t end, const uint32_t *first,
                    size_t first_count, uint32_t item, long min, long max)
{
    struct automaton *a = b->a;
    uint32_t at = jsonform_step(a, from, '[', '[');
    if (!min)
        automaton_add_byte(a, at, end, ']', ']');
    uint32_t begin = automaton_add_node(a); /* not `at`: no "]" behind a comma */
    automaton_add_empty(a, at, begin);
    for (long i = 0; max < 0 || i < max; i++) {
        uint32_t done = automaton_add_node(a);
        automaton_add_call(a, begin, done, (size_t)i < first_count ? first[i] : item);
        if (i + 1 >= min)
            automaton_add_byte(a, done, end, ']', ']');
        if (max >= 0 && i + 1 >= max)
            break;
        uint32_t next = jsonform_space(a, jsonform_step(a, done, ',', ','));
        if (max < 0 && i + 1 >= min && (size_t)i + 1 > first_count) {
            automaton_add_empty(a, next, begin);
            break;
        }
        begin = next;
    }
}

void jsonform_words(struct automaton *a, uint32_t from, uint32_t end, unsigned types)
{
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++)
        if (types & (i < 2 ? VALUES_BOOLEAN : VALUES_NULL))
            automaton_add_empty(a, automaton_add_text(a, from, words[i]), end);
}

uint32_t jsonform_any(struct jsonform *b)
{
    if (b->any)
        return b->any - 1;
    struct automaton *a = b->a;
    uint32_t rule = automaton_add_rule(a);
    b->any = rule + 1;
    uint32_t start = a->rules[rule].start, end = a->rules[rule].end;
    b->number = b->number ? b->number : jsonform_number(b, false, false) + 1;
    automaton_add_call(a, start, end, jsonform_string(b));
    automaton_add_call(a, start, end, b->number - 1);
    automaton_add_call(a, start, end, jsonform_free_object(b));
    jsonform_words(a, start, end, VALUES_BOOLEAN | VALUES_NULL);
    jsonform_items(b, start, end, NULL, 0, rule, 0, -1);
    return rule;
}
