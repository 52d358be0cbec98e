/* Random schemas and tools: what a grammar lets through fits them.
 *
 *   fuzz_grammar [COUNT [SEED]]     default 300 (3,000 with CALLA_TEST_LONG) and 1
 *
 * Each case walks an answer through mask and accept with the demo vocabulary, tokens taken at
 * random and out of texts that imitate the form of tool calls. A finished answer must be JSON that
 * an independent validator takes; finished calls must come out of the parser as the values that
 * stand in the text (pitfalls 34 and 35). Schemas made to be costly must end in bounded time and
 * memory. Case i depends on the sum of the seed and i only. */
#include "validate.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/rand.h"
#include "text/grammar.h"
#include "text/parser.h"

#include <inttypes.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 400, DEPTH = 4 };

static struct tokenizer *tokenizer;
static struct grammar_vocab *vocab;
static float *logits;
static uint32_t *open_ids;
static int32_t stop;
static uint64_t passed, failed, finished;

static void die(const char *what)
{
    fprintf(stderr, "fuzz_grammar: %s\n", what);
    exit(1);
}

/* ---- random schemas ------------------------------------------------------------------------ */

static json_t *random_schema(struct rand *r, int depth, bool defs);

static json_t *random_word(struct rand *r)
{
    static const char *const words[] = {
        "",   "a",    "red", "two words", "\"q\"",       "line\nbreak", "</function>", "7",
        "x<", "true", "\t",  "ä日",       "<tool_call>", "C:\\path\\n", "null",        "blue",
    };
    switch (rand_below(r, 6)) {
    case 0:
        return json_integer((json_int_t)rand_below(r, 2000) - 1000);
    case 1:
        return rand_below(r, 2) ? json_null() : json_boolean(rand_below(r, 2));
    default:
        return json_string(words[rand_below(r, sizeof words / sizeof *words)]);
    }
}

static json_t *random_enum(struct rand *r)
{
    json_t *list = json_array();
    for (uint64_t n = 1 + rand_below(r, 5); n; n--)
        json_array_append_new(list, random_word(r));
    return json_pack("{s:o}", "enum", list);
}

static json_t *random_string(struct rand *r)
{
    static const char *const formats[] = {"date", "time", "date-time", "uuid", "email", "uri"};
    static const char *const patterns[] = {
        "^[a-z]+(-[a-z0-9]+)*$",
        "^(red|green)? ?[0-9]{2,4}$",
        "^.{3}$",
        "x+y",
        "^[^a-z]{2,}q",
        "^\\\\[\"a]?$",
        "[.]$",
        "^(a|bc)(,(a|bc)){0,3}$",
    };
    json_t *schema = json_pack("{s:s}", "type", "string");
    uint64_t min = rand_below(r, 4);
    if (rand_below(r, 4) == 0) {
        bool format = rand_below(r, 2);
        json_object_set_new(
            schema, format ? "format" : "pattern",
            json_string(format ? formats[rand_below(r, 6)] : patterns[rand_below(r, 8)]));
        return schema;
    }
    if (rand_below(r, 3) == 0)
        json_object_set_new(schema, "minLength", json_integer((json_int_t)min));
    if (rand_below(r, 3) == 0)
        json_object_set_new(schema, "maxLength",
                            json_integer((json_int_t)(min + rand_below(r, 20))));
    return schema;
}

static json_t *random_array(struct rand *r, int depth, bool defs)
{
    json_t *schema = json_pack("{s:s}", "type", "array");
    uint64_t min = rand_below(r, 3);
    if (rand_below(r, 3))
        json_object_set_new(schema, "items", random_schema(r, depth - 1, defs));
    if (rand_below(r, 4) == 0) {
        json_t *first = json_array();
        for (uint64_t n = 1 + rand_below(r, 3); n; n--)
            json_array_append_new(first, random_schema(r, depth - 1, defs));
        json_object_set_new(schema, "prefixItems", first);
    }
    if (rand_below(r, 3) == 0)
        json_object_set_new(schema, "minItems", json_integer((json_int_t)min));
    if (rand_below(r, 2))
        json_object_set_new(schema, "maxItems", json_integer((json_int_t)(min + rand_below(r, 4))));
    return schema;
}

/* `properties` and `required` of an object. */
static void random_properties(struct rand *r, json_t *schema, int depth, bool defs)
{
    static const char *const keys[] = {"a", "b", "ab", "name", "two words", "q\"", "x<y", "ü"};
    json_t *all = json_object(), *required = json_array();
    for (uint64_t n = rand_below(r, 5); n; n--) {
        const char *key = keys[rand_below(r, sizeof keys / sizeof *keys)];
        if (json_object_get(all, key))
            continue;
        json_object_set_new(all, key, random_schema(r, depth - 1, defs));
        if (rand_below(r, 2))
            json_array_append_new(required, json_string(key));
    }
    json_object_set_new(schema, "properties", all);
    json_object_set_new(schema, "required", required);
}

static json_t *random_object(struct rand *r, int depth, bool defs)
{
    json_t *schema = json_pack("{s:s}", "type", "object");
    if (rand_below(r, 5))
        random_properties(r, schema, depth, defs);
    else if (rand_below(r, 2))
        json_object_set_new(schema, "additionalProperties", random_schema(r, depth - 1, defs));
    if (rand_below(r, 4) == 0 && json_object_get(schema, "properties"))
        json_object_set_new(schema, "additionalProperties", json_false());
    return schema;
}

static json_t *random_union(struct rand *r, int depth, bool defs)
{
    json_t *list = json_array();
    for (uint64_t n = 1 + rand_below(r, 3); n; n--)
        json_array_append_new(list, random_schema(r, depth - 1, defs));
    return json_pack("{s:o}", rand_below(r, 2) ? "anyOf" : "oneOf", list);
}

static json_t *random_bounds(struct rand *r)
{
    json_t *schema = json_pack("{s:s}", "type", "integer");
    json_int_t low = (json_int_t)(rand_u64(r) >> (8 + rand_below(r, 56))) - 1000;
    if (rand_below(r, 3))
        json_object_set_new(schema, rand_below(r, 2) ? "minimum" : "exclusiveMinimum",
                            json_integer(low));
    if (rand_below(r, 3))
        json_object_set_new(schema, rand_below(r, 2) ? "maximum" : "exclusiveMaximum",
                            json_integer(low + (json_int_t)rand_below(r, 2000)));
    return schema;
}

static json_t *random_leaf(struct rand *r)
{
    static const char *const types[] = {"boolean", "null", "number", "integer"};
    switch (rand_below(r, 8)) {
    case 0:
        return random_enum(r);
    case 1:
        return json_pack("{s:o}", "const", random_word(r));
    case 2:
        return rand_below(r, 4) ? json_pack("{s:[s,s]}", "type", "string", "null") : json_true();
    case 3:
    case 4:
        return random_string(r);
    case 5:
        return rand_below(r, 2) ? random_bounds(r)
                                : json_pack("{s:s, s:i}", "type", "number", "minimum", 0);
    default:
        return json_pack("{s:s, s:s}", "type", types[rand_below(r, 4)], "description", "words");
    }
}

static json_t *random_schema(struct rand *r, int depth, bool defs)
{
    if (depth <= 0 || rand_below(r, 3) == 0)
        return random_leaf(r);
    switch (rand_below(r, defs ? 6 : 5)) {
    case 0:
        return random_array(r, depth, defs);
    case 1:
    case 2:
        return random_object(r, depth, defs);
    case 3:
        return random_union(r, depth, defs);
    case 4:
        return json_pack("{s:[o, o]}", "allOf", random_object(r, depth, defs),
                         random_object(r, depth, defs));
    default:
        return json_pack("{s:s}", "$ref", rand_below(r, 2) ? "#/$defs/one" : "#/$defs/two");
    }
}

static json_t *random_root(struct rand *r)
{
    json_t *schema = random_schema(r, DEPTH, true);
    if (json_is_object(schema))
        json_object_set_new(schema, "$defs",
                            json_pack("{s:o, s:o}", "one", random_schema(r, 2, true), "two",
                                      random_schema(r, 2, true)));
    return schema;
}

static json_t *random_tools(struct rand *r)
{
    static const char *const names[] = {"f", "get_it", "g"};
    json_t *tools = json_array();
    for (uint64_t i = 0, n = 1 + rand_below(r, 3); i < n; i++) {
        json_t *schema = json_pack("{s:s}", "type", "object");
        random_properties(r, schema, 3, false);
        json_object_del(json_object_get(schema, "properties"), "x<y");
        json_t *required = json_object_get(schema, "required");
        for (size_t k = json_array_size(required); k-- > 0;)
            if (!strcmp(json_string_value(json_array_get(required, k)), "x<y"))
                json_array_remove(required, k);
        json_array_append_new(tools, json_pack("{s:s, s:{s:s, s:o}}", "type", "function",
                                               "function", "name", names[i], "parameters", schema));
    }
    return tools;
}

/* ---- walks --------------------------------------------------------------------------------- */

struct walk {
    struct rand *r;
    struct grammar_run *run;
    struct buf text;
    bool done, broken;
};

static size_t walk_open(struct walk *w)
{
    size_t n = tokenizer_vocab(tokenizer), count = 0;
    memset(logits, 0, n * sizeof *logits);
    grammar_run_mask(w->run, &stop, 1, logits, n);
    for (uint32_t id = 0; id < n; id++)
        if (logits[id] == 0)
            open_ids[count++] = id;
    return count;
}

static bool walk_take(struct walk *w, int32_t id)
{
    size_t n;
    const char *p = tokenizer_bytes(tokenizer, id, &n);
    if (!grammar_run_accept(w->run, id))
        return false;
    buf_append(&w->text, p, n);
    return true;
}

/* Texts that imitate the form, as far as the grammar takes them. */
static void walk_spell(struct walk *w)
{
    static const char *const texts[] = {
        "\n</parameter>",
        "\n</parameter>\n<parameter=",
        "</parameter>",
        " </parameter>\n</function>\n</tool_call>",
        "\n</function>\n</tool_call>",
        "\n</tool_call>\n<tool_call>\n<function=g>\n",
        "<function=other>\n<parameter=b>\n",
        "\n<parameter=b>\n",
        "\n<parameter=a>\n",
        "a <parameter=ab> ",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n</parameter>\n"
        "</function>\n</tool_call>",
        "<function=g>\n<parameter=name>\nx\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<tool_call>\n",
        "</function>\n",
        "\n  ",
        "\r\n\t",
        "\"",
        "\"}]",
        "\\u003c/parameter>",
    };
    const char *text = texts[rand_below(w->r, sizeof texts / sizeof *texts)];
    struct token_list ids = {0};
    struct err err;
    /* As plain text: the added tokens are not what a value is spelt with. */
    struct text_range plain = {0, strlen(text)};
    if (!tokenizer_encode(tokenizer, text, strlen(text), &plain, 1, &ids, &err))
        die(err.text);
    for (size_t i = 0; i < ids.len && walk_take(w, ids.ids[i]); i++)
        ;
    token_list_free(&ids);
}

/* A token: any that is open, or one that tends to close what is open. */
static uint32_t walk_choose(struct walk *w, size_t count, unsigned close)
{
    size_t kept = 0;
    if (rand_below(w->r, 10) >= close)
        return open_ids[rand_below(w->r, count)];
    for (size_t i = 0; i < count; i++) {
        size_t n;
        const char *p = tokenizer_bytes(tokenizer, (int32_t)open_ids[i], &n);
        if (n && n < 3 && strchr("\"}],\n", p[0]))
            open_ids[kept++] = open_ids[i];
    }
    return open_ids[rand_below(w->r, kept ? kept : count)];
}

static void walk_run(struct walk *w)
{
    for (int t = 0; t < STEPS && !w->broken; t++) {
        size_t count = walk_open(w);
        bool may_end = logits[stop] == 0;
        if (!count || (grammar_run_is_done(w->run) && (count != 1 || !may_end)))
            w->broken = true;
        if (may_end && (count == 1 || rand_below(w->r, 4) == 0)) {
            w->done = true;
            return;
        }
        for (int i = 0; i < 8 && !w->broken; i++) {
            int32_t id = (int32_t)rand_below(w->r, tokenizer_vocab(tokenizer));
            if (logits[id] != 0 && id != stop && grammar_run_accept(w->run, id))
                w->broken = true; /* masked, but taken */
        }
        if (rand_below(w->r, 4) == 0 || t > STEPS / 2)
            walk_spell(w);
        count = walk_open(w);
        int32_t id = (int32_t)walk_choose(w, count, t > STEPS / 2 ? 9 : 3);
        if (id != stop && !walk_take(w, id))
            w->broken = true; /* not masked, but refused */
    }
}

static bool report(uint64_t number, const char *what, const json_t *schema, const struct buf *text)
{
    char *json = json_dumps(schema, JSON_ENCODE_ANY | JSON_COMPACT);
    printf("seed %" PRIu64 ": %s\n  %s\n  %.*s\n", number, what, json, (int)text->len,
           text->data ? text->data : "");
    free(json);
    return false;
}

static bool check_refusal(uint64_t number, const struct err *err, const json_t *schema)
{
    bool fine = err->kind == ERR_USAGE && err->text[0] && !strchr(err->text, '\n');
    return fine || report(number, err->text, schema, &(struct buf){0});
}

static bool case_schema(struct rand *r, uint64_t number)
{
    json_t *schema = random_root(r);
    struct grammar *grammar;
    struct err err = {0};
    struct walk w = {.r = r};
    bool ok = true;
    if (grammar_from_schema(schema, &grammar, &err)) {
        w.run = grammar_run_open(grammar, vocab);
        walk_run(&w);
        grammar_run_close(w.run);
        grammar_free(grammar);
    } else {
        ok = check_refusal(number, &err, schema);
    }
    if (w.broken)
        ok = report(number, "mask and accept disagree, or nothing is open", schema, &w.text);
    if (w.done) {
        json_error_t why;
        json_t *value = json_loadb(w.text.data, w.text.len, JSON_DECODE_ANY, &why);
        finished++;
        if (!value)
            ok = report(number, why.text, schema, &w.text);
        else if (!validate(schema, schema, value))
            ok = report(number, "does not fit the schema", schema, &w.text);
        json_decref(value);
    }
    buf_free(&w.text);
    json_decref(schema);
    return ok;
}

/* ---- calls --------------------------------------------------------------------------------- */

struct call {
    struct buf name, args;
};

struct calls {
    struct call list[64];
    size_t count;
    struct buf other;
};

static void calls_note(void *user, const struct parser_event *event)
{
    struct calls *c = user;
    if (event->kind == PARSER_CALL_BEGIN && c->count < 64) {
        buf_append(&c->list[c->count++].name, event->text, event->len);
    } else if (event->kind == PARSER_CALL_ARGS) {
        buf_append(&c->list[event->call].args, event->text, event->len);
    } else if (event->kind == PARSER_CONTENT || event->kind == PARSER_REASONING) {
        buf_append(&c->other, event->text, event->len);
    }
}

static bool calls_skip(const char **p, const char *text)
{
    size_t n = strlen(text);
    if (strncmp(*p, text, n) != 0)
        return false;
    *p += n;
    return true;
}

/* Reads the call that stands at *p again, guided by the values that the parser found. */
static bool calls_match(const char **p, const char *name, const json_t *args)
{
    const char *key;
    json_t *value;
    if (!calls_skip(p, "<tool_call>\n<function=") || !calls_skip(p, name) || !calls_skip(p, ">\n"))
        return false;
    json_object_foreach((json_t *)args, key, value)
    {
        const char *text = json_string_value(value), *end = strchr(*p, '>');
        if (!calls_skip(p, "<parameter=") || !calls_skip(p, key) || !calls_skip(p, ">\n"))
            return false;
        if (text && !*text && calls_skip(p, "</parameter>\n"))
            continue;
        if (text) {
            if (!calls_skip(p, text))
                return false;
        } else {
            end = strchr(*p, '\n');
            json_t *there = end ? json_loadb(*p, (size_t)(end - *p), JSON_DECODE_ANY, NULL) : NULL;
            bool same = there && json_equal(there, value);
            json_decref(there);
            if (!same)
                return false;
            *p = end;
        }
        if (!calls_skip(p, "\n</parameter>\n"))
            return false;
    }
    return calls_skip(p, "</function>\n</tool_call>");
}

static bool calls_check(const struct calls *c, const json_t *tools, const char *text)
{
    const char *p = text;
    while (*p == '\n')
        p++;
    for (size_t i = 0; i < c->count; i++) {
        json_t *args = json_loadb(c->list[i].args.data, c->list[i].args.len, 0, NULL), *tool;
        const json_t *schema = NULL;
        size_t k;
        json_array_foreach(tools, k, tool)
        {
            const json_t *f = json_object_get(tool, "function");
            if (!strcmp(json_string_value(json_object_get(f, "name")), c->list[i].name.data))
                schema = json_object_get(f, "parameters");
        }
        bool ok = args && schema && calls_match(&p, c->list[i].name.data, args) &&
                  validate(schema, schema, args) && (i + 1 == c->count || *p++ == '\n');
        json_decref(args);
        if (!ok)
            return false;
    }
    return c->count && !*p && !c->other.len;
}

static bool case_tools(struct rand *r, uint64_t number)
{
    json_t *tools = random_tools(r);
    struct grammar *grammar;
    struct err err = {0};
    struct walk w = {.r = r};
    bool ok = true;
    if (grammar_from_tools(tools, rand_below(r, 2) ? NULL : "f", rand_below(r, 2), &grammar,
                           &err)) {
        w.run = grammar_run_open(grammar, vocab);
        walk_run(&w);
        grammar_run_close(w.run);
        grammar_free(grammar);
    } else {
        ok = check_refusal(number, &err, tools);
    }
    if (w.broken)
        ok = report(number, "mask and accept disagree, or nothing is open", tools, &w.text);
    if (w.done) {
        struct calls calls = {0};
        struct parser_options options = {.tools = tools, .on_event = calls_note, .user = &calls};
        struct parser *parser = parser_open(&options);
        for (size_t at = 0, n; at < w.text.len; at += n) {
            n = 1 + rand_below(r, 9);
            n = n < w.text.len - at ? n : w.text.len - at;
            parser_feed(parser, w.text.data + at, n);
        }
        parser_finish(parser);
        parser_close(parser);
        finished++;
        if (!calls_check(&calls, tools, w.text.data))
            ok = report(number, "the calls come back otherwise", tools, &w.text);
        for (size_t i = 0; i < calls.count; i++) {
            buf_free(&calls.list[i].name);
            buf_free(&calls.list[i].args);
        }
        buf_free(&calls.other);
    }
    buf_free(&w.text);
    json_decref(tools);
    return ok;
}

/* ---- costly schemas ------------------------------------------------------------------------ */

static json_t *nasty_enum(int n)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_sprintf("value number %d of many", i));
    return json_pack("{s:o}", "enum", list);
}

static json_t *nasty_optional(int n)
{
    json_t *all = json_object();
    for (int i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "property_%d", i);
        json_object_set_new(all, name, json_pack("{s:s}", "type", "string"));
    }
    return json_pack("{s:s, s:o}", "type", "object", "properties", all);
}

static json_t *nasty_deep(int n, bool wide)
{
    json_t *schema = json_pack("{s:s}", "type", "integer");
    for (int i = 0; i < n; i++)
        schema = wide ? json_pack("{s:[o, {s:s}]}", "anyOf", schema, "type", "string")
                      : json_pack("{s:s, s:o}", "type", "array", "items", schema);
    return schema;
}

/* Each definition leads to the one behind it; with `member`, through a property. */
static json_t *nasty_chain(int n, bool member)
{
    json_t *defs = json_object();
    for (int i = 0; i < n; i++) {
        char name[32], next[48];
        snprintf(name, sizeof name, "d%d", i);
        snprintf(next, sizeof next, "#/$defs/d%d", i + 1);
        json_t *ref =
            i + 1 < n ? json_pack("{s:s}", "$ref", next) : json_pack("{s:s}", "type", "null");
        json_object_set_new(
            defs, name,
            member ? json_pack("{s:s, s:{s:o}}", "type", "object", "properties", "next", ref)
                   : ref);
    }
    return json_pack("{s:s, s:o}", "$ref", "#/$defs/d0", "$defs", defs);
}

/* Each definition holds the two behind it: a tree of 2^n if it were written out. */
static json_t *nasty_tree(int n)
{
    json_t *defs = json_object();
    for (int i = 0; i < n; i++) {
        char name[32], next[48];
        snprintf(name, sizeof name, "d%d", i);
        snprintf(next, sizeof next, "#/$defs/d%d", i + 1);
        json_object_set_new(defs, name,
                            i + 1 < n ? json_pack("{s:[{s:s}, {s:s, s:{s:s}}]}", "anyOf", "$ref",
                                                  next, "type", "array", "items", "$ref", next)
                                      : json_pack("{s:s}", "type", "null"));
    }
    return json_pack("{s:s, s:o}", "$ref", "#/$defs/d0", "$defs", defs);
}

static json_t *nasty_objects(int n)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:s, s:{s:{s:s}, s:{s:i}}, s:[s, s]}", "type",
                                              "object", "properties", "kind", "type", "string",
                                              "id", "const", i, "required", "kind", "id"));
    return json_pack("{s:o}", "anyOf", list);
}

static json_t *nasty_lengths(int n)
{
    json_t *all = json_object();
    for (int i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "s%d", i);
        json_object_set_new(
            all, name,
            json_pack("{s:s, s:i, s:i}", "type", "string", "minLength", 8000, "maxLength", 8192));
    }
    return json_pack("{s:s, s:o}", "type", "object", "properties", all);
}

static bool case_nasty(const char *name, json_t *schema, bool wants, struct rand *r)
{
    struct err err = {0};
    struct grammar *grammar;
    struct walk w = {.r = r};
    uint64_t start = clock_now_ns();
    bool built = grammar_from_schema(schema, &grammar, &err);
    double build_s = clock_seconds_since(start);
    for (int walks = 0; built && walks < 3; walks++) {
        w.run = grammar_run_open(grammar, vocab);
        for (int t = 0; t < 60 && !w.broken; t++) {
            size_t count = walk_open(&w);
            int32_t id = count ? (int32_t)walk_choose(&w, count, 5) : stop;
            w.broken = !count;
            if (id == stop)
                break;
            w.broken = w.broken || !walk_take(&w, id);
        }
        grammar_run_close(w.run);
    }
    double all_s = clock_seconds_since(start), mib = (double)mem_resident_bytes() / (1 << 20);
    if (built)
        grammar_free(grammar);
    bool ok = !w.broken && built == wants && all_s < 20 && mib < 2000 &&
              (built || (err.kind == ERR_USAGE && err.text[0]));
    printf("%-4s %-26s built in %.3f s, walked in %.3f s, %.0f MiB%s%.200s\n", ok ? "ok" : "FAIL",
           name, build_s, all_s - build_s, mib, built ? "" : ": ", built ? "" : err.text);
    buf_free(&w.text);
    json_decref(schema);
    return ok;
}

static void count_case(bool ok)
{
    passed += ok;
    failed += !ok;
}

static void nasty_all(void)
{
    struct rand r = {11};
    count_case(case_nasty("enum of 5,000", nasty_enum(5000), true, &r));
    count_case(case_nasty("enum of 200,000", nasty_enum(200000), false, &r));
    count_case(case_nasty("1,000 optional properties", nasty_optional(1000), true, &r));
    count_case(case_nasty("2,000 properties", nasty_optional(2000), false, &r));
    count_case(case_nasty("anyOf 90 deep", nasty_deep(90, true), true, &r));
    count_case(case_nasty("anyOf 1,000 deep", nasty_deep(1000, true), false, &r));
    count_case(case_nasty("arrays 90 deep", nasty_deep(90, false), true, &r));
    count_case(case_nasty("80 $defs in a row", nasty_chain(80, true), true, &r));
    count_case(case_nasty("4,000 $defs in a row", nasty_chain(4000, true), true, &r));
    count_case(case_nasty("5,000 bare $refs in a row", nasty_chain(5000, false), true, &r));
    count_case(case_nasty("20,000 $defs in a row", nasty_chain(20000, true), false, &r));
    count_case(case_nasty("tree of 2^60", nasty_tree(60), true, &r));
    count_case(case_nasty("anyOf of 1,000 objects", nasty_objects(1000), true, &r));
    count_case(case_nasty("strings of 8,192", nasty_lengths(4), true, &r));
    count_case(case_nasty("many strings of 8,192", nasty_lengths(100), false, &r));
}

int main(int argc, char **argv)
{
    uint64_t usual = getenv("CALLA_TEST_LONG") ? 3000 : 300;
    uint64_t count = argc > 1 ? strtoull(argv[1], NULL, 10) : usual;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    struct err err;
    setlocale(LC_ALL, "C.UTF-8"); /* the validator's patterns count characters */
    if (!tokenizer_open("models/demo", &tokenizer, &err))
        die(err.text);
    vocab = grammar_vocab_open(tokenizer);
    logits = mem_new(tokenizer_vocab(tokenizer), sizeof *logits);
    open_ids = mem_new(tokenizer_vocab(tokenizer), sizeof *open_ids);
    stop = tokenizer_find(tokenizer, "<|im_end|>");
    for (uint64_t i = 0; i < count; i++) {
        struct rand r = {.state = (seed + i) * 0x9e3779b97f4a7c15u};
        count_case(rand_below(&r, 2) ? case_schema(&r, seed + i) : case_tools(&r, seed + i));
    }
    printf("%" PRIu64 " of %" PRIu64 " answers finished\n", finished, count);
    if (argc < 2)
        nasty_all();
    free(logits);
    free(open_ids);
    grammar_vocab_close(vocab);
    tokenizer_close(tokenizer);
    printf("%" PRIu64 " passed, %" PRIu64 " failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
