/* The streaming parser: what it makes of outputs, in one piece and cut at every byte. */
#include "text/parser.h"

#include "base/mem.h"
#include "spent.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char test_tools_text[] =
    "[{'type':'function','function':{'name':'f','parameters':{'type':'object','properties':{"
    "'s':{'type':'string'},'i':{'type':'integer'},'n':{'type':'number'},'b':{'type':'boolean'},"
    "'z':{'type':['string','null']},'a':{'type':'array','items':{'type':'integer'}},"
    "'o':{'type':'object'},'e':{'enum':['x','y']},'k':{'enum':[1,2]},'any':{},"
    "'u':{'anyOf':[{'type':'integer'},{'type':'null'}]},'r':{'$ref':'#/$defs/R'},"
    "'m':{'type':['string','integer']}},'$defs':{'R':{'type':'object'}}}}},"
    "{'type':'function','function':{'name':'write','parameters':{'type':'object','properties':{"
    "'path':{'type':'string'},'content':{'type':'string'}}}}}]";

static json_t *test_tools(void)
{
    char *text = mem_copy_text(test_tools_text, strlen(test_tools_text));
    for (char *p = text; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_t *tools = json_loads(text, 0, NULL);
    free(text);
    assert_non_null(tools);
    return tools;
}

/* Everything that was heard, as text: R(..) C(..) and name{..} in order of arrival, deltas
 * joined. */
struct heard {
    struct buf text, args;
    const char *fed;
    size_t shown; /* of what was fed: where the last content ended */
    int last;
    size_t calls, ended;
};

static void heard_close(struct heard *h)
{
    if (h->last == PARSER_REASONING || h->last == PARSER_CONTENT)
        buf_append_char(&h->text, ')');
    h->last = -1;
}

static void heard_on_event(void *user, const struct parser_event *e)
{
    struct heard *h = user;
    if (e->kind == PARSER_REASONING || e->kind == PARSER_CONTENT) {
        assert_true(e->len > 0);
        if (e->kind == PARSER_CONTENT) {
            assert_true(e->at >= h->shown);
            assert_memory_equal(e->text, h->fed + e->at, e->len);
            h->shown = e->at + e->len;
        }
        if (h->last != (int)e->kind) {
            heard_close(h);
            buf_append_text(&h->text, e->kind == PARSER_CONTENT ? "C(" : "R(");
        }
        buf_append(&h->text, e->text, e->len);
        h->last = e->kind;
        return;
    }
    heard_close(h);
    if (e->kind == PARSER_CALL_BEGIN) {
        assert_int_equal(e->call, h->calls++);
        assert_int_equal(h->ended, e->call);
        buf_append(&h->text, e->text, e->len);
        buf_clear(&h->args);
        return;
    }
    assert_int_equal(e->call + 1, h->calls);
    buf_append(&h->args, e->text, e->len);
    if (e->kind == PARSER_CALL_END) {
        json_t *args = json_loadb(h->args.data, h->args.len, JSON_DECODE_INT_AS_REAL, NULL);
        assert_true(json_is_object(args));
        json_decref(args);
        buf_append(&h->text, h->args.data, h->args.len);
        h->ended++;
    }
}

/* Feeds text in pieces of `step` bytes, the first piece of `first` bytes; the caller frees. */
static char *hear(const json_t *tools, bool thinking, const char *text, size_t first, size_t step)
{
    struct heard h = {.last = -1, .fed = text};
    struct parser *parser = parser_open(&(struct parser_options){
        .thinking_open = thinking, .tools = tools, .on_event = heard_on_event, .user = &h});
    size_t n = strlen(text), at = first < n ? first : n;
    parser_feed(parser, text, at);
    while (at < n) {
        size_t k = step < n - at ? step : n - at;
        /* what was judged is not content any more */
        h.shown = h.shown > parser_judged(parser) ? h.shown : parser_judged(parser);
        parser_feed(parser, text + at, k);
        at += k;
    }
    parser_finish(parser);
    parser_close(parser);
    heard_close(&h);
    assert_int_equal(h.calls, h.ended);
    buf_append_text(&h.text, "");
    buf_free(&h.args);
    return h.text.data;
}

/* Parses at once, byte by byte and cut once at every byte (pitfall 28). */
static void check(const json_t *tools, bool thinking, const char *text, const char *want)
{
    char *whole = hear(tools, thinking, text, SIZE_MAX, 1);
    if (want)
        assert_string_equal(whole, want);
    char *bytes = hear(tools, thinking, text, 1, 1);
    assert_string_equal(bytes, whole);
    free(bytes);
    for (size_t cut = 1; cut < strlen(text); cut++) {
        char *two = hear(tools, thinking, text, cut, SIZE_MAX);
        assert_string_equal(two, whole);
        free(two);
    }
    free(whole);
}

#define P(key, value) "<parameter=" key ">\n" value "\n</parameter>\n"
#define F(name, body) "<function=" name ">\n" body "</function>\n"
#define CALL(name, body) "<tool_call>\n" F(name, body) "</tool_call>"

/* Where no calls are wanted, all of the answer is content. */
static void test_without_calls(void **state)
{
    static const char text[] = "so\n</think>\n\na\n" CALL("f", P("s", "x")) "\n<function=f>\nb\n";
    struct heard h = {.last = -1, .fed = text};
    for (size_t step = 1; step < sizeof text; step++) {
        struct parser *parser = parser_open(&(struct parser_options){.thinking_open = true,
                                                                     .no_calls = true,
                                                                     .tools = *state,
                                                                     .on_event = heard_on_event,
                                                                     .user = &h});
        for (size_t at = 0; at < sizeof text - 1; at += step)
            parser_feed(parser, text + at,
                        step < sizeof text - 1 - at ? step : sizeof text - 1 - at);
        parser_finish(parser);
        parser_close(parser);
        heard_close(&h);
        assert_string_equal(h.text.data,
                            "R(so)C(a\n" CALL("f", P("s", "x")) "\n<function=f>\nb\n)");
        buf_clear(&h.text);
        h.shown = 0;
    }
    buf_free(&h.text);
}

static void test_thoughts_and_text(void **state)
{
    const json_t *tools = *state;
    check(tools, true, "plan\n</think>\n\nHello\nyou\n", "R(plan)C(Hello\nyou\n)");
    check(tools, true, "plan", "R(plan)");
    check(tools, true, "a\n\nb\n", "R(a\n\nb\n)");
    check(tools, true, "</think>\n\nHi", "C(Hi)");
    check(tools, true, "<think>\nx</think>y", "R(x)C(y)");
    check(tools, false, "Hello", "C(Hello)");
    check(tools, false, "<think>\nx\n</think>\n\ny", "R(x)C(y)");
    check(tools, false, "use </think> to close, <think> to open",
          "C(use </think> to close, <think> to open)");
    check(tools, true, "a</think>b</think>c", "R(a)C(b</think>c)");
    check(tools, false, "1 < 2 <b> </thin <tool_call> <tool",
          "C(1 < 2 <b> </thin <tool_call> <tool)");
    check(tools, false, "日本語 🙂 naïve", "C(日本語 🙂 naïve)");
    check(tools, false, "", "");
    check(tools, false, "\n\n", "");
}

static void test_calls(void **state)
{
    const json_t *tools = *state;
    check(tools, true, "need\n</think>\n\n" CALL("f", P("s", "Oslo") P("i", "2")),
          "R(need)f{\"s\": \"Oslo\", \"i\": 2}");
    check(tools, false, "Checking.\n\n" CALL("f", "") "\n" CALL("g", P("x", "true")),
          "C(Checking.)f{}g{\"x\": \"true\"}");
    /* Pitfalls 29 and 38: one function three times. */
    check(tools, false,
          CALL("f", P("i", "1")) "\n" CALL("f", P("i", "2")) "\n" CALL("f", P("i", "3")) "\n",
          "f{\"i\": 1}f{\"i\": 2}f{\"i\": 3}");
    check(tools, false, "a\n" CALL("f", "") "\n\nb", "C(a)f{}C(\n\nb)");
    check(tools, false, CALL("f", "") "\n\nb\n", "f{}C(b\n)");
    /* Without any newline of the form. */
    check(tools, false,
          "<tool_call><function=f><parameter=s>Oslo</parameter><parameter=i>2</parameter></"
          "function></tool_call>",
          "f{\"s\": \"Oslo\", \"i\": 2}");
    /* Pitfall 40: names that were not declared. */
    check(tools, false, CALL("nobody", P("q", "\"a\"\t1")), "nobody{\"q\": \"\\\"a\\\"\\t1\"}");
    check(NULL, false, CALL("nobody", P("q", "1")), "nobody{\"q\": \"1\"}");
    /* Pitfall 23: a call in a thought that was not closed. */
    check(tools, true, "plan text " CALL("f", P("i", "1")), "R(plan text )f{\"i\": 1}");
    check(NULL, true, "plan text\n" CALL("f", P("i", "1")), "R(plan text)f{\"i\": \"1\"}");
    check(tools, true, "like " CALL("example", P("i", "1")) " so",
          "R(like " CALL("example", P("i", "1")) " so)");
    check(tools, true, "a " CALL("f", "") "\nb</think>c", "R(a )f{}R(\nb)C(c)");
}

static void test_no_call(void **state)
{
    const json_t *tools = *state;
    static const char *const texts[] = {
        "the tag <tool_call> is",
        "<tool_call>\n{\"name\": \"f\"}\n</tool_call>",
        "<tool_call>\n<function=f>\nwords",
        "<tool_call>\n<function=",
        "<tool_call>\n<function=f>",
        "use <function=f> so",
        "<function=nobody>\n<parameter=x>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=>\n</function>",
        "</function>\n</tool_call>",
        "<function=f",
        "a<"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct buf want = {0};
        buf_printf(&want, "C(%s)", texts[i]);
        check(tools, false, texts[i], want.data);
        buf_free(&want);
    }
}

/* Pitfall 31: closing tags that are missing; 32: a missing <tool_call>. */
static void test_missing_tags(void **state)
{
    const json_t *tools = *state;
    const char *both = "f{\"s\": \"a\", \"i\": 1}";
    check(tools, false,
          "<tool_call>\n<function=f>\n<parameter=s>\na\n" P("i", "1") "</function>\n</tool_call>",
          both);
    check(tools, false,
          "<tool_call>\n<function=f>\n" P("s", "a") "<parameter=i>\n1\n</function>\n</tool_call>",
          both);
    check(tools, false, "<tool_call>\n<function=f>\n" P("s", "a") P("i", "1") "</tool_call>", both);
    check(tools, false, "<tool_call>\n<function=f>\n" P("s", "a") P("i", "1") "</function>\n",
          both);
    check(tools, false, "<tool_call>\n<function=f>\n" P("s", "a") P("i", "1"), both);
    check(tools, false, "<tool_call>\n<function=f>\n" P("s", "a") "<parameter=i>\n1", both);
    check(
        tools, false,
        "<tool_call>\n<function=f>\n" P("s", "a") "<parameter=i>\n1\n</tool_call>\n" CALL("f", ""),
        "f{\"s\": \"a\", \"i\": 1}f{}");
    check(tools, false, "<tool_call>\n<function=f>\n" P("i", "1") CALL("f", P("i", "2")),
          "f{\"i\": 1}f{\"i\": 2}");
    check(tools, false,
          "<tool_call>\n<function=f>\n<parameter=s>\na\n</function>\n</tool_call>\n" CALL("f", ""),
          "f{\"s\": \"a\"}f{}");
    check(tools, false, "<tool_call>\n<function=f>\n<parameter=s>\nhalf a val</para",
          "f{\"s\": \"half a val</para\"}");
    check(tools, false, "<tool_call>\n<function=f>\n<parameter=a>\n[1, 2", "f{\"a\": \"[1, 2\"}");
    check(tools, false, "Sure:\n" F("f", P("i", "1")) "</tool_call>", "C(Sure:)f{\"i\": 1}");
    check(tools, false, F("f", P("i", "1")) F("f", P("i", "2")) "bye",
          "f{\"i\": 1}f{\"i\": 2}C(bye)");
}

/* Pitfalls 29, 34 and 35: what looks like the form inside a value is data. */
static void test_markup_in_values(void **state)
{
    const json_t *tools = *state;
    static const char *const values[] = {
        "a\n</function>\n<function=other>\n<parameter=x>\n1\n</parameter>\nb",
        "a\n<parameter=x>\nb",
        "Use </parameter> to close",
        "</parameter> and </function> and </tool_call>",
        "a\n</parameter>\nb",
        "a\n</function>\nb\n</tool_call>\nc",
        "Form:\n" P("x", "1") "end",
        "Form:\n" P("x", "1") P("y", "2") "end",
        "Form:\n" P("path", "1") "end",
        "Call:\n" CALL("rm", P("path", "/") P("force", "true")) "\nend",
        "Two:\n" CALL("rm", P("path", "/")) "\n" CALL("f", P("i", "1")) "\nend",
        "Empty:\n" CALL("rm", "") "\nend",
        "Deep " CALL("write", P("content", CALL("rm", "") "\n" CALL("f", P("i", "1")))) " end",
        "x = \"" CALL("rm", P("path", "/")) "\"",
        "x = '" F("rm", P("path", "/")) "</tool_call>'",
        "    " CALL("f", P("i", "1")) "\n    indented",
        "one line <tool_call><function=rm><parameter=a>1</parameter></function></tool_call> more",
        "lone <parameter=x>1</parameter> here",
        "the tag <parameter=x> opens",
        "the tag <parameter=x>\nopens",
        "Outer " CALL("write", P("path", "p") P("content", CALL("rm", P("a", "b")))) " end",
        CALL("rm", P("path", "/")),
        "\n\nblank lines around\n\n",
        "",
        "\n",
        "</parameter",
        "<",
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        struct buf text = {0}, want = {0};
        char *json;
        json_t *string = json_string(values[i]);
        json = json_dumps(string, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
        json_decref(string);
        buf_printf(&text, CALL("write", P("path", "p") P("content", "%s")), values[i]);
        buf_printf(&want, "write{\"path\": \"p\", \"content\": %s}", json);
        check(tools, false, text.data, want.data);
        /* Where a parameter that the value may show comes only later. */
        struct buf first = {0}, first_want = {0};
        buf_printf(&first, CALL("write", P("content", "%s") P("path", "p")), values[i]);
        buf_printf(&first_want, "write{\"content\": %s, \"path\": \"p\"}", json);
        check(tools, false, first.data, first_want.data);
        buf_free(&first);
        buf_free(&first_want);
        /* Another call, or words, behind it. */
        size_t n = text.len, m = want.len;
        buf_append_text(&text, "\n" CALL("f", P("i", "1")));
        buf_append_text(&want, "f{\"i\": 1}");
        check(tools, false, text.data, want.data);
        text.len = n;
        want.len = m;
        buf_append_text(&text, "\nbye");
        buf_append_text(&want, "C(bye)");
        check(tools, false, text.data, want.data);
        buf_free(&text);
        buf_free(&want);
        free(json);
    }
}

/* An opening tag that a value only talks about does not swallow the next parameter. */
static void test_lone_opener(void **state)
{
    check(*state, false, CALL("write", P("path", "a\n<parameter=q>\nb") P("content", "c")),
          "write{\"path\": \"a\\n<parameter=q>\\nb\", \"content\": \"c\"}");
    check(*state, false, CALL("write", P("path", "a <parameter=q> b") P("content", "c")),
          "write{\"path\": \"a <parameter=q> b\", \"content\": \"c\"}");
}

/* Pitfall 34: a parameter that the tool has, closed within the value, is shown and not given; one
 * that nothing but the call follows is given (pitfall 31), and so is one that goes on for long. */
static void test_shown_parameters(void **state)
{
    const json_t *tools = *state;
    check(tools, false,
          CALL("f", P("s", "Say:\n" P("i", "1") "or\n" P("i", "2") "end") P("i", "3")),
          "f{\"s\": \"Say:\\n<parameter=i>\\n1\\n</parameter>\\nor\\n<parameter=i>\\n2\\n"
          "</parameter>\\nend\", \"i\": 3}");
    check(tools, false, CALL("f", P("s", "Say:\n" P("i", "1") "")),
          "f{\"s\": \"Say:\\n<parameter=i>\\n1\\n</parameter>\\n\"}");
    check(tools, false, CALL("f", P("s", P("i", "1") "</function>\nend") P("i", "3")),
          "f{\"s\": \"<parameter=i>\\n1\\n</parameter>\\n</function>\\nend\", \"i\": 3}");
    check(tools, false, CALL("f", "<parameter=s>\nSay:\n" P("i", "1") P("b", "true")),
          "f{\"s\": \"Say:\", \"i\": 1, \"b\": true}");
    struct buf text = {0}, want = {0};
    for (size_t n = 1000; n <= 1040; n++) {
        buf_printf(&text,
                   "<tool_call>\n<function=write>\n<parameter=content>\nx\n<parameter=path>\n");
        buf_printf(&want, "write{\"content\": \"x\", \"path\": \"");
        for (size_t i = 0; i < n; i++) {
            buf_append_char(&text, 'p');
            buf_append_char(&want, 'p');
        }
        buf_append_text(&text, "\n</parameter>\n</function>\n</tool_call>");
        buf_append_text(&want, "\"}");
        check(tools, false, text.data, want.data);
        buf_clear(&text);
        buf_clear(&want);
    }
    buf_free(&text);
    buf_free(&want);
}

/* Pitfall 37. */
static void test_value_types(void **state)
{
    const json_t *tools = *state;
    static const char *const cases[][3] = {
        {"s", "true", "\"true\""},
        {"s", "007", "\"007\""},
        {"s", "null", "\"null\""},
        {"s", "{\"a\": 1}", "\"{\\\"a\\\": 1}\""},
        {"s", "a\\b\n\t\"q\"", "\"a\\\\b\\n\\t\\\"q\\\"\""},
        {"any", "12", "\"12\""},
        {"unknown", "12", "\"12\""},
        {"i", "12", "12"},
        {"i", " -5 ", "-5"},
        {"i", "007", "7"},
        {"i", "5.0", "5"},
        {"i", "5.5", "\"5.5\""},
        {"i", "null", "null"},
        {"i", "twelve", "\"twelve\""},
        {"i", "123456789012345678901234567890", "123456789012345678901234567890"},
        {"n", "1.50", "1.50"},
        {"n", "-1e-5", "-1e-5"},
        {"n", "3", "3"},
        {"n", "nan", "\"nan\""},
        {"n", "1.", "\"1.\""},
        {"b", "true", "true"},
        {"b", "False", "false"},
        {"b", "yes", "\"yes\""},
        {"z", "null", "null"},
        {"z", "nullify", "\"nullify\""},
        {"z", "a long text that is surely not null", "\"a long text that is surely not null\""},
        {"u", "3", "3"},
        {"u", "None", "null"},
        {"a", "[1, 2, 3]", "[1, 2, 3]"},
        {"a", "[1,\n 12345678901234567890]", "[1,\n 12345678901234567890]"},
        {"a", "['it', \"x'y\", None, True]", "[\"it\", \"x'y\", null, true]"},
        {"a", "[1, 2", "\"[1, 2\""},
        {"o", "{\"a\": {\"b\": [true, null]}, \"c\": \"x\"}",
         "{\"a\": {\"b\": [true, null]}, \"c\": \"x\"}"},
        {"o", "{'a': 'b\\'s'}", "{\"a\": \"b's\"}"},
        {"r", "{\"a\": 1}", "{\"a\": 1}"},
        {"e", "x", "\"x\""},
        {"k", "2", "2"},
        {"m", "5", "5"},
        {"m", "05x", "\"05x\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf text = {0}, want = {0};
        buf_printf(&text,
                   "<tool_call>\n<function=f>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</"
                   "tool_call>",
                   cases[i][0], cases[i][1]);
        buf_printf(&want, "f{\"%s\": %s}", cases[i][0], cases[i][2]);
        check(tools, false, text.data, want.data);
        buf_free(&text);
        buf_free(&want);
    }
}

/* Pitfall 28: outputs put together from parts at random, cut short at random. */
static void test_random_outputs(void **state)
{
    const json_t *tools = *state;
    static const char *const parts[] = {"text",
                                        "\n",
                                        "\n\n",
                                        " ",
                                        "<",
                                        "</think>",
                                        "<think>",
                                        "<tool_call>",
                                        "<tool_call>\n",
                                        "<function=f>",
                                        "<function=write>\n",
                                        "<function=nobody>\n",
                                        "<parameter=s>\n",
                                        "<parameter=i>",
                                        "<parameter=content>\n",
                                        "\n</parameter>\n",
                                        "</parameter>",
                                        "</function>\n",
                                        "</function>",
                                        "</tool_call>",
                                        "\n</tool_call>\n",
                                        CALL("f", P("i", "1") P("s", "x")),
                                        F("write", P("path", "p")),
                                        "12",
                                        "null",
                                        "[1]",
                                        "é",
                                        "🙂",
                                        "\"",
                                        "\\"};
    size_t count = getenv("CALLA_TEST_LONG") ? 5000 : 400;
    uint32_t seed = 1;
    for (size_t i = 0; i < count; i++) {
        struct buf text = {0};
        size_t n = 1 + i % 24;
        for (size_t k = 0; k < n; k++) {
            seed = seed * 1664525 + 1013904223;
            buf_append_text(&text, parts[(seed >> 12) % (sizeof parts / sizeof *parts)]);
        }
        check(tools, i & 1, text.data, NULL);
        buf_free(&text);
    }
}

static void ignore_event(void *user, const struct parser_event *e)
{
    *(size_t *)user += e->len;
}

/* A megabyte of each of these takes well under a second a piece, fed byte by byte. */
static void test_linear_time(void **state)
{
    static const char *const bodies[] = {"a",
                                         "\n",
                                         "<",
                                         "</parameter>\n",
                                         "<parameter=x>\n",
                                         "<tool_call>\n<function=f>\n",
                                         "\n<parameter=i>\n</parameter>\n",
                                         "\n<parameter=i>\nx</parameter>x",
                                         "</function>\n</function>",
                                         "</parameter>                    "};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        struct buf text = {0};
        buf_append_text(&text, "<tool_call>\n<function=f>\n<parameter=s>\n");
        while (text.len < 1 << 20)
            buf_append_text(&text, bodies[i]);
        for (int inside = 0; inside < 2; inside++) {
            size_t total = 0;
            double start = spent_ms();
            struct parser *parser = parser_open(&(struct parser_options){
                .tools = *state, .on_event = ignore_event, .user = &total});
            for (size_t at = inside ? 0 : 40; at < text.len; at++)
                parser_feed(parser, text.data + at, 1);
            parser_finish(parser);
            parser_close(parser);
            assert_true(spent_ms() - start < 10000); /* sanitizers included */
        }
        buf_free(&text);
    }
}

static int setup(void **state)
{
    *state = test_tools();
    return 0;
}

static int teardown(void **state)
{
    json_decref(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_calls), cmocka_unit_test(test_thoughts_and_text),
        cmocka_unit_test(test_calls),         cmocka_unit_test(test_no_call),
        cmocka_unit_test(test_missing_tags),  cmocka_unit_test(test_markup_in_values),
        cmocka_unit_test(test_lone_opener),   cmocka_unit_test(test_shown_parameters),
        cmocka_unit_test(test_value_types),   cmocka_unit_test(test_random_outputs),
        cmocka_unit_test(test_linear_time),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
