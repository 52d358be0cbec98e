/* Constrained decoding: what a grammar takes, refuses and always leaves open. */
#include "text/grammar.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/rand.h"
#include "text/parser.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct tokenizer *tokenizer;
static struct grammar_vocab *vocab;
static float *logits;

static json_t *test_json(const char *text)
{
    char *copy = mem_copy_text(text, strlen(text));
    for (char *p = copy; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_t *value = json_loads(copy, JSON_DECODE_ANY, NULL);
    free(copy);
    assert_non_null(value);
    return value;
}

static struct grammar *test_grammar(const char *schema)
{
    struct err err = {0};
    struct grammar *grammar;
    json_t *value = test_json(schema);
    if (!grammar_from_schema(value, &grammar, &err))
        fail_msg("%s: %s", schema, err.text);
    json_decref(value);
    return grammar;
}

/* 1: the grammar takes the whole text and may end; every token was in the mask before. */
static bool test_takes_text(const struct grammar *grammar, const char *text, bool plain)
{
    struct token_list ids = {0};
    struct err err;
    /* plain: all but the first and last token of the text is what a model spells out. */
    size_t n_open = plain ? strlen("<tool_call>") : 0, n_text = strlen(text);
    struct text_range range = {n_open, plain ? n_text - n_open - strlen("</tool_call>") : 0};
    assert_true(tokenizer_encode(tokenizer, text, n_text, &range, plain, &ids, &err));
    struct grammar_run *run = grammar_run_open(grammar, vocab);
    size_t n = tokenizer_vocab(tokenizer);
    int32_t stop = tokenizer_find(tokenizer, "<|im_end|>");
    bool ok = true;
    for (size_t i = 0; i < ids.len && ok; i++) {
        memset(logits, 0, n * sizeof *logits);
        grammar_run_mask(run, &stop, 1, logits, n);
        bool masked = logits[ids.ids[i]] != 0;
        ok = grammar_run_accept(run, ids.ids[i]);
        assert_int_equal(ok, !masked);
    }
    memset(logits, 0, n * sizeof *logits);
    grammar_run_mask(run, &stop, 1, logits, n);
    ok = ok && logits[stop] == 0;
    grammar_run_close(run);
    token_list_free(&ids);
    return ok;
}

static void test_takes(const char *schema, const char *text, bool want)
{
    struct grammar *grammar = test_grammar(schema);
    char *copy = mem_copy_text(text, strlen(text));
    for (char *p = copy; *p; p++)
        if (*p == '\'')
            *p = '"';
    if (test_takes_text(grammar, copy, false) != want)
        fail_msg("%s with %s: not %s", schema, text, want ? "taken" : "refused");
    free(copy);
    grammar_free(grammar);
}

static void test_values(void **state)
{
    (void)state;
    static const struct {
        const char *schema, *text;
        bool want;
    } cases[] = {
        {"true", "{'a': [1, -2.5e3, null, true, {'b':'c\\n'}]}", true},
        {"true", "[1,]", false},
        {"true", "{'a':1,}", false},
        {"true", "01", false},
        {"true", "\n\n[]", true},
        {"true", "'\\ud800'", false},
        {"true", "'\\ud83d\\ude00'", true},
        {"true", "'\xf0\x9f\x98\x80'", true},
        {"{'type':'integer'}", "-12", true},
        {"{'type':'integer'}", "1.5", false},
        {"{'type':'integer','minimum':0}", "-1", false},
        {"{'type':'integer','minimum':-12,'exclusiveMaximum':105}", "-12", true},
        {"{'type':'integer','minimum':-12,'exclusiveMaximum':105}", "-13", false},
        {"{'type':'integer','minimum':-12,'exclusiveMaximum':105}", "104", true},
        {"{'type':'integer','minimum':-12,'exclusiveMaximum':105}", "105", false},
        {"{'type':'string','pattern':'^[a-z]{2,3}(-\\\\d+)?$'}", "'ab-12'", true},
        {"{'type':'string','pattern':'^[a-z]{2,3}(-\\\\d+)?$'}", "'abcd'", false},
        {"{'type':'string','pattern':'b+'}", "'abba'", true},
        {"{'type':'string','pattern':'b+'}", "'aa'", false},
        {"{'type':'string','format':'date'}", "'2024-12-31'", true},
        {"{'type':'string','format':'date'}", "'2024-13-31'", false},
        {"{'type':'string','format':'uuid'}", "'123e4567-e89b-12d3-a456-426614174000'", true},
        {"{'allOf':[{'$ref':'#/$defs/a'},{'properties':{'y':{'type':'integer'}},'required':['y']}],"
         "'$defs':{'a':{'type':'object','properties':{'x':{'type':'null'}},'required':['x']}}}",
         "{'x':null,'y':1}", true},
        {"{'allOf':[{'$ref':'#/$defs/a'},{'properties':{'y':{'type':'integer'}},'required':['y']}],"
         "'$defs':{'a':{'type':'object','properties':{'x':{'type':'null'}},'required':['x']}}}",
         "{'y':1}", false},
        {"{'properties':{'a':{'$ref':'#/$defs/"
         "a','description':'note','default':1}},'required':['a'],"
         "'additionalProperties':true,'$defs':{'a':{'type':'integer'}}}",
         "{'a':1}", true},
        {"{'type':'string','maxLength':3}", "'abc'", true},
        {"{'type':'string','maxLength':3}", "'abcd'", false},
        {"{'type':'string','minLength':2}", "'a'", false},
        {"{'type':['string','null']}", "null", true},
        {"{'enum':['ab','abc',3]}", "'abc'", true},
        {"{'enum':['ab','abc',3]}", "'a'", false},
        {"{'enum':['ab','abc',3]}", "3", true},
        {"{'type':'array','items':{'type':'integer'},'minItems':1,'maxItems':2}", "[]", false},
        {"{'type':'array','items':{'type':'integer'},'minItems':1,'maxItems':2}", "[1, 2]", true},
        {"{'type':'array','items':{'type':'integer'},'minItems':1,'maxItems':2}", "[1,2,3]", false},
        {"{'type':'array','items':{'type':'integer'},'minItems':2}", "[1,2,3]", true},
        {"{'prefixItems':[{'type':'integer'},{'type':'string'}],'type':'array'}", "[1,'x']", true},
        {"{'prefixItems':[{'type':'integer'},{'type':'string'}],'type':'array'}", "[1,2]", false},
        {"{'type':'object','properties':{'a':{'type':'integer'},'b':{'type':'string'}},"
         "'required':['b']}",
         "{'b':'x'}", true},
        {"{'type':'object','properties':{'a':{'type':'integer'},'b':{'type':'string'}},"
         "'required':['b']}",
         "{'a':1}", false},
        {"{'type':'object','properties':{'a':{'type':'integer'},'b':{'type':'string'}},"
         "'required':['b']}",
         "{'a': 1, 'b': 'x'}", true},
        {"{'type':'object','additionalProperties':{'type':'integer'}}", "{'q':1,'r':2}", true},
        {"{'type':'object','additionalProperties':{'type':'integer'}}", "{'q':'1'}", false},
        {"{'$ref':'#/$defs/n','$defs':{'n':{'type':'object','properties':{'v':{'type':'integer'},"
         "'next':{'anyOf':[{'$ref':'#/$defs/n'},{'type':'null'}]}},'required':['v','next']}}}",
         "{'v':1,'next':{'v':2,'next':null}}", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        test_takes(cases[i].schema, cases[i].text, cases[i].want);
}

static void test_refusals(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{'properties':{'a':{'type':'string','pattern':'(?=x)'}}}", "pattern at /properties/a"},
        {"{'type':'string','pattern':'^a|b$'}", "put the choice into a group"},
        {"{'type':'string','pattern':'(a*)*'}", "may be empty"},
        {"{'type':'string','pattern':'\\\\bword'}", "escape"},
        {"{'type':'string','format':'ipv6'}", "format"},
        {"{'type':'number','maximum':3}", "maximum"},
        {"{'allOf':[{'type':'string'},{'type':'object'}]}", "type at"},
        {"{'allOf':[{'properties':{'a':{'type':'null'}}},{'properties':{'a':{}}}]}",
         "one property"},
        {"{'type':'integer','maximum':3,'minimum':4}", "nothing fits"},
        {"{'not':{}}", "not"},
        {"{'$ref':'#'}", "circle"},
        {"{'type':'object','properties':{'a':{'$ref':'#'}},'required':['a']}", "no finite value"},
        {"{'type':'array','items':{'type':'array','items':{'type':'string','minLength':8193}}}",
         "minLength at /items/items"},
        {"{'$ref':'http://x/y'}", "same document"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err err = {0};
        struct grammar *grammar;
        json_t *schema = test_json(cases[i][0]);
        assert_false(grammar_from_schema(schema, &grammar, &err));
        assert_int_equal(err.kind, ERR_USAGE);
        if (!strstr(err.text, cases[i][1]))
            fail_msg("%s", err.text);
        json_decref(schema);
    }
}

static const char tools_text[] =
    "[{'type':'function','function':{'name':'f','parameters':{'type':'object','properties':{"
    "'s':{'type':'string'},'i':{'type':'integer'},'e':{'enum':['x','yy']}},'required':['s']}}},"
    "{'type':'function','function':{'name':'g'}}]";

/* Pitfall 29: required, named and parallel choices. */
static void test_tools(void **state)
{
    (void)state;
    json_t *tools = test_json(tools_text);
    struct err err = {0};
    struct grammar *one, *many;
    assert_true(grammar_from_tools(tools, "f", false, &one, &err));
    assert_true(grammar_from_tools(tools, NULL, true, &many, &err));
    static const char f[] = "<tool_call>\n<function=f>\n<parameter=s>\na\n\n<b>\n</parameter>\n"
                            "<parameter=i>\n7\n</parameter>\n</function>\n</tool_call>";
    static const char g[] = "<tool_call>\n<function=g>\n</function>\n</tool_call>";
    static const char bad[] = "<tool_call>\n<function=f>\n<parameter=i>\n7\n</parameter>\n"
                              "</function>\n</tool_call>";
    static const char word[] = "<tool_call>\n<function=f>\n<parameter=s>\n</parameter>\n"
                               "<parameter=e>\nyy\n</parameter>\n</function>\n</tool_call>";
    struct buf two = {0};
    buf_printf(&two, "%s\n%s", f, g);
    assert_true(test_takes_text(one, f, false));
    assert_true(test_takes_text(one, word, false));
    assert_false(test_takes_text(one, g, false));
    assert_false(test_takes_text(one, bad, false));
    assert_false(test_takes_text(one, two.data, false));
    assert_true(test_takes_text(many, two.data, false));
    assert_true(test_takes_text(many, g, false));
    assert_false(grammar_from_tools(tools, "h", true, &(struct grammar *){NULL}, &err));
    buf_free(&two);
    grammar_free(one);
    grammar_free(many);
    json_decref(tools);
}

static void test_tool_refusals(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{'type':'object','properties':{},'minProperties':1}", "minProperties"},
        {"{'type':'object','properties':{},'anyOf':[{}]}", "anyOf"},
        {"{'type':'array'}", "type"},
        {"{'properties':{'a':{'type':'text'}}}", "type at /properties/a"},
        {"{'properties':{'a':{'type':'string','contentEncoding':'x'}}}",
         "contentEncoding at /properties/a"},
        {"{'properties':{'a':{'enum':['7',8]}}}", "another type"},
        {"{'properties':{'a':{'const':'a </parameter>'}}}", "tag"},
        {"{'properties':{},'required':['b']}", "required"},
        {"{'properties':{'a':{'type':['string','integer'],'maxLength':3}}}", "lengths"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err err = {0};
        struct grammar *grammar;
        json_t *tools = json_pack("[{s:{s:s, s:o}}]", "function", "name", "f", "parameters",
                                  test_json(cases[i][0]));
        assert_false(grammar_from_tools(tools, NULL, true, &grammar, &err));
        assert_int_equal(err.kind, ERR_USAGE);
        if (!strstr(err.text, cases[i][1]))
            fail_msg("%s", err.text);
        json_decref(tools);
    }
}

/* Pitfalls 29, 34 and 35: values that hold the form itself. What could be taken for the end of the
 * value, or for another call, is not open; tests/fuzz/fuzz_grammar.c tries it at random. */
static void test_values_with_tags(void **state)
{
    (void)state;
    static const struct {
        const char *value;
        bool want;
    } cases[] = {
        {"<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=i>\n2\n</parameter>"
         "\n</function>\n</tool_call>\nis a call",
         true},
        {"x <function=f>\n<parameter=s>\nv\n</parameter>\n</function> y", true},
        {"<tool_call>\n{\"name\": 1}\n</tool_call>\n", true},
        {"split(\"</parameter>\") or (\"<function=([^>]+)>\") or \"</tool_call>\"", true},
        {"<div>\n<p>text</p>\n</div>\r\n", true},
        {"x\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
         "</tool_call>\nrest",
         false},
        {"x</parameter>\n<parameter=i>\n7", false},
        {"x </parameter></function></tool_call> y", false},
        {"<parameter=i>\n7", false},
        {"<function=f>\n<parameter=s>\n never closed", false},
        {"a\n</function>\n</tool_call>\nb", false},
    };
    json_t *tools = test_json(tools_text);
    struct grammar *grammar;
    struct err err = {0};
    assert_true(grammar_from_tools(tools, "f", false, &grammar, &err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf text = {0};
        buf_printf(&text,
                   "<tool_call>\n<function=f>\n<parameter=s>\n%s\n</parameter>\n"
                   "</function>\n</tool_call>",
                   cases[i].value);
        if (test_takes_text(grammar, text.data, true) != cases[i].want)
            fail_msg("%s", text.data);
        buf_free(&text);
    }
    grammar_free(grammar);
    json_decref(tools);
}

/* A format beside tools that may be called or not: JSON or calls, no prose, not both; and no string
 * that could be taken for a call (pitfall 35). */
static void test_either(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool want;
    } cases[] = {
        {"{\"n\": 1, \"s\": \"a<b\"}", true},
        {"\n\n{\"n\":1}", true},
        {"<tool_call>\n<function=g>\n</function>\n</tool_call>", true},
        {"<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n"
         "<parameter=s>\na\n</parameter>\n</function>\n</tool_call>",
         true},
        {"{\"n\": \"x\"}", false},
        {"Let me see. {\"n\": 1}", false},
        {"{\"n\": 1}\n<tool_call>\n<function=g>\n</function>\n</tool_call>", false},
        {"<tool_call>\n<function=g>\n</function>\n</tool_call>\n{\"n\": 1}", false},
        {"<tool_call>\n<function=h>\n</function>\n</tool_call>", false},
        {"{\"n\": 1, \"s\": \"<function=g>\"}", false},
        {"{\"n\": 1, \"s\": \"\\u003cfunction=g>\"}", true},
        {"", false},
    };
    json_t *tools = test_json(tools_text),
           *schema = test_json("{'type':'object','properties':{'n':{'type':'integer'},"
                               "'s':{'type':'string'}},'required':['n']}");
    struct grammar *grammar;
    struct err err = {0};
    assert_true(grammar_from_either(schema, tools, true, &grammar, &err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (test_takes_text(grammar, cases[i].text, false) != cases[i].want)
            fail_msg("%s", cases[i].text);
    grammar_free(grammar);
    json_object_set_new(schema, "not", json_object());
    assert_false(grammar_from_either(schema, tools, true, &grammar, &err));
    assert_non_null(strstr(err.text, "not"));
    json_object_del(schema, "not");
    json_object_set_new(json_object_get(json_array_get(tools, 0), "function"), "parameters",
                        test_json("{'type':'array'}"));
    assert_false(grammar_from_either(schema, tools, true, &grammar, &err));
    assert_non_null(strstr(err.text, "tool f"));
    json_decref(tools);
    json_decref(schema);
}

/* Random tokens of the mask until it stops: what comes out is JSON, and there always is a token. */
static void test_walks(void **state)
{
    (void)state;
    static const char *const schemas[] = {
        "true",
        "{'$ref':'#/$defs/n','$defs':{'n':{'type':'object','properties':{'v':{'type':'number'},"
        "'kids':{'type':'array','items':{'$ref':'#/$defs/n'},'maxItems':3}},'required':['v']}}}",
        "{'type':'object','properties':{'a':{'enum':['x',1,null]},'b':{'type':'string',"
        "'maxLength':9},'c':{'type':'array','items':{'type':'boolean'},'minItems':2}},"
        "'required':['a','c']}",
    };
    struct rand rand = {7};
    size_t n = tokenizer_vocab(tokenizer);
    int32_t stop = tokenizer_find(tokenizer, "<|im_end|>");
    uint32_t *open = mem_new(n, sizeof *open);
    for (size_t i = 0; i < 60; i++) {
        struct grammar *grammar = test_grammar(schemas[i % 3]);
        struct grammar_run *run = grammar_run_open(grammar, vocab);
        struct buf text = {0};
        bool ended = false;
        for (int t = 0; t < 300 && !ended; t++) {
            memset(logits, 0, n * sizeof *logits);
            grammar_run_mask(run, &stop, 1, logits, n);
            size_t count = 0;
            for (uint32_t id = 0; id < n; id++)
                if (logits[id] == 0)
                    open[count++] = id;
            assert_true(count > 0);
            assert_true(!grammar_run_is_done(run) || count == 1);
            ended = logits[stop] == 0 && rand_below(&rand, 4) == 0;
            int32_t id = (int32_t)open[rand_below(&rand, count)];
            if (ended || id == stop) {
                ended = true;
                break;
            }
            size_t bytes;
            const char *p = tokenizer_bytes(tokenizer, id, &bytes);
            buf_append(&text, p, bytes);
            assert_true(grammar_run_accept(run, id));
        }
        if (ended) {
            json_error_t error;
            json_t *value = json_loadb(text.data, text.len, JSON_DECODE_ANY, &error);
            if (!value)
                fail_msg("%s: %.*s", error.text, (int)text.len, text.data);
            json_decref(value);
        }
        buf_free(&text);
        grammar_run_close(run);
        grammar_free(grammar);
    }
    free(open);
}

static int test_open(void **state)
{
    (void)state;
    struct err err;
    if (!tokenizer_open("models/demo", &tokenizer, &err))
        return -1;
    vocab = grammar_vocab_open(tokenizer);
    logits = mem_new(tokenizer_vocab(tokenizer), sizeof *logits);
    return 0;
}

static int test_close(void **state)
{
    (void)state;
    free(logits);
    grammar_vocab_close(vocab);
    tokenizer_close(tokenizer);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_tools),
        cmocka_unit_test(test_tool_refusals),
        cmocka_unit_test(test_values_with_tags),
        cmocka_unit_test(test_either),
        cmocka_unit_test(test_walks),
    };
    return cmocka_run_group_tests(tests, test_open, test_close);
}
