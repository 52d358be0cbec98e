/* The chat template by hand-written examples; tests/e2e/test_template.py compares with jinja2. */
#include "text/template.h"

#include "text/pyjson.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define USER(text) "<|im_start|>user\n" text "<|im_end|>\n"
#define SYSTEM(text) "<|im_start|>system\n" text "<|im_end|>\n"
#define ASSISTANT(text) "<|im_start|>assistant\n" text "<|im_end|>\n"
#define OPEN "<|im_start|>assistant\n<think>\n"
#define SHUT "<|im_start|>assistant\n<think>\n\n</think>\n\n"

/* JSON with ' for ". */
static json_t *read_json(const char *text)
{
    struct buf json = {0};
    for (const char *p = text; *p; p++)
        buf_append_char(&json, *p == '\'' ? '"' : *p);
    json_error_t why;
    json_t *value = json_loads(json.data, 0, &why);
    if (!value)
        fail_msg("%s: %s", text, why.text);
    buf_free(&json);
    return value;
}

static const struct template_options think = {.add_generation_prompt = true,
                                              .enable_thinking = true};
static const struct template_options keep = {
    .add_generation_prompt = true, .enable_thinking = true, .preserve_thinking = true};
static const struct template_options no_think = {.add_generation_prompt = true};

static void check(const char *messages, const char *tools, const struct template_options *options,
                  const char *want)
{
    json_t *m = read_json(messages), *t = tools ? read_json(tools) : NULL;
    struct template_prompt prompt;
    struct err err = {0};
    if (!template_render(m, t, options, &prompt, &err))
        fail_msg("%s", err.text);
    assert_string_equal(prompt.text.data, want);
    assert_int_equal(prompt.thinking_open,
                     options->add_generation_prompt && options->enable_thinking);
    size_t at = 0;
    for (size_t i = 0; i < prompt.plain_count; i++) {
        assert_true(prompt.plain[i].start >= at && prompt.plain[i].len > 0);
        at = prompt.plain[i].start + prompt.plain[i].len;
    }
    assert_true(at <= prompt.generation_pos && prompt.generation_pos <= prompt.text.len);
    template_prompt_free(&prompt);
    json_decref(m);
    json_decref(t);
}

static void check_error(const char *messages, const char *want)
{
    json_t *m = messages ? read_json(messages) : NULL;
    struct template_prompt prompt;
    struct err err = {0};
    assert_false(template_render(m, NULL, &think, &prompt, &err));
    assert_int_equal(err.kind, ERR_USAGE);
    assert_ptr_equal(strstr(err.text, want), err.text);
    assert_null(prompt.text.data);
    json_decref(m);
}

static void test_turns(void **state)
{
    (void)state;
    check("[{'role':'user','content':'Hi'}]", NULL, &think, USER("Hi") OPEN);
    check("[{'role':'user','content':'Hi'}]", NULL, &no_think, USER("Hi") SHUT);
    check("[{'role':'user','content':'Hi'}]", NULL, &(struct template_options){0}, USER("Hi"));
    check("[{'role':'system','content':'  Be brief.\\n'},{'role':'user','content':'Hi'}]", NULL,
          &think, SYSTEM("Be brief.") USER("Hi") OPEN);
    check("[{'role':'system','content':''},{'role':'user','content':'\\u3000Hi\\u0085'}]", "[]",
          &think, SYSTEM("") USER("Hi") OPEN);
}

static void test_thoughts(void **state)
{
    (void)state;
    const char *history = "[{'role':'user','content':'Hi'},{'role':'assistant','content':'Hello!',"
                          "'reasoning_content':'plan'},{'role':'user','content':'Bye'}]";
    check(history, NULL, &think, USER("Hi") ASSISTANT("Hello!") USER("Bye") OPEN);
    check(history, NULL, &keep,
          USER("Hi") ASSISTANT("<think>\nplan\n</think>\n\nHello!") USER("Bye") OPEN);
    check("[{'role':'user','content':'Hi'},{'role':'assistant','content':'<think>\\nplan\\n</"
          "think>\\n\\nHello!'}]",
          NULL, &no_think, USER("Hi") ASSISTANT("<think>\nplan\n</think>\n\nHello!") SHUT);
    /* Pitfall 22: in six messages, only one thought; the others get no empty blocks. */
    check(
        "[{'role':'user','content':'1'},{'role':'assistant','content':'a'},{'role':'user','content'"
        ":'2'},"
        "{'role':'assistant','content':'b','reasoning_content':'r'},{'role':'user','content':'3'},"
        "{'role':'assistant','content':'c'}]",
        NULL, &(struct template_options){0},
        USER("1") ASSISTANT("a") USER("2") ASSISTANT("b") USER("3")
            ASSISTANT("<think>\n\n</think>\n\nc"));
    /* Kept, each turn is what was generated: an empty thought is what no_think begins with. */
    check(
        "[{'role':'user','content':'1'},{'role':'assistant','content':'a'},{'role':'user','content'"
        ":'2'},"
        "{'role':'assistant','content':'b','reasoning_content':'r'},{'role':'user','content':'3'},"
        "{'role':'assistant','content':'c'},{'role':'user','content':'4'}]",
        NULL, &keep,
        USER("1") ASSISTANT("<think>\n\n</think>\n\na") USER("2")
            ASSISTANT("<think>\nr\n</think>\n\nb") USER("3") ASSISTANT("<think>\n\n</think>\n\nc")
                USER("4") OPEN);
}

/* Pitfall 25. */
static void test_think_in_content(void **state)
{
    (void)state;
    /* With reasoning_content the content stays whole. */
    check("[{'role':'user','content':'q'},{'role':'assistant','content':'use </think> to close',"
          "'reasoning_content':''},{'role':'user','content':'r'}]",
          NULL, &think, USER("q") ASSISTANT("use </think> to close") USER("r") OPEN);
    /* Without it the official template takes what precedes the tag for a thought; so do we. */
    check("[{'role':'user','content':'q'},{'role':'assistant','content':'use </think> to close'},"
          "{'role':'user','content':'r'}]",
          NULL, &think, USER("q") ASSISTANT(" to close") USER("r") OPEN);
    check("[{'role':'user','content':'q </think> q'}]", NULL, &think, USER("q </think> q") OPEN);
}

static void test_tools(void **state)
{
    (void)state;
    check("[{'role':'user','content':'q'},{'role':'assistant','content':'Checking.','tool_calls':["
          "{'type':'function','function':{'name':'a','arguments':{'x':true,'s':'t','o':{'u':[1,2.0,"
          "null]}}}},"
          "{'name':'b','arguments':'{}'}]},"
          "{'role':'tool','content':'r1'},{'role':'tool','content':[{'type':'text','text':'r2'}]},"
          "{'role':'assistant','content':'Done.'},{'role':'user','content':'More'}]",
          NULL, &no_think,
          USER("q") ASSISTANT(
              "Checking.\n\n<tool_call>\n<function=a>\n<parameter=x>\ntrue\n</parameter>\n"
              "<parameter=s>\nt\n</parameter>\n<parameter=o>\n{\"u\": [1, 2.0, null]}\n"
              "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=b>\n"
              "</function>\n</tool_call>")
              USER("<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>")
                  ASSISTANT("Done.") USER("More") SHUT);
}

static void test_head(void **state)
{
    (void)state;
    json_t *m =
        read_json("[{'role':'system','content':'Be brief.'},{'role':'user','content':'q'}]");
    json_t *t = read_json("[{'type':'function','function':{'name':'f','description':'<é>'}}]");
    struct template_prompt prompt;
    struct err err = {0};
    assert_true(template_render(m, t, &think, &prompt, &err));
    const char *open =
        "<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
        "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"<é>\"}}\n"
        "</tools>\n\nIf you";
    assert_memory_equal(prompt.text.data, open, strlen(open));
    const char *close = "</IMPORTANT>\n\nBe brief.<|im_end|>\n";
    assert_memory_equal(prompt.text.data + prompt.head_len - strlen(close), close, strlen(close));
    assert_string_equal(prompt.text.data + prompt.head_len, USER("q") OPEN);
    assert_string_equal(prompt.text.data + prompt.generation_pos, OPEN);
    assert_int_equal(prompt.plain_count, 3);
    assert_int_equal(prompt.plain[1].len, strlen("Be brief."));
    template_prompt_free(&prompt);
    json_decref(m);
    json_decref(t);
}

/* Pitfalls 19 and 20. */
static void test_system_anywhere(void **state)
{
    (void)state;
    check("[{'role':'user','content':'a'},{'role':'assistant','content':'b'},{'role':'system','"
          "content':' c '},"
          "{'role':'user','content':'d'}]",
          NULL, &think, USER("a") ASSISTANT("b") SYSTEM("c") USER("d") OPEN);
    check("[{'role':'system','content':'a'},{'role':'system','content':' "
          "'},{'role':'developer','content':'b'},"
          "{'role':'user','content':'c'}]",
          NULL, &think, SYSTEM("a\n\nb") USER("c") OPEN);
    check("[{'role':'developer','content':'a'},{'role':'developer','content':'b'},{'role':'user','"
          "content':'c'}]",
          NULL, &think, SYSTEM("a\n\nb") USER("c") OPEN);
    check("[{'role':'system','content':'a'}]", NULL, &think, SYSTEM("a") OPEN);
    check("[{'role':'system','content':'a'},{'role':'developer','content':'b'}]", NULL, &no_think,
          SYSTEM("a\n\nb") SHUT);
}

/* Pitfall 26: the forms of a content, for every role. */
static void test_content_forms(void **state)
{
    (void)state;
    static const char *const contents[][2] = {
        {"'content':'x'", "x"},
        {"'content':[{'type':'text','text':'x'}]", "x"},
        {"'content':[{'type':'text','text':' '},{'type':'text','text':'x'}]", "x"},
        {"'content':''", ""},
        {"'content':[]", ""},
        {"'content':null", ""},
        {"'name':'no content'", ""},
    };
    static const char *const roles[][3] = {
        {"system", "<|im_start|>system\n", "<|im_end|>\n"},
        {"user", "<|im_start|>user\n", "<|im_end|>\n"},
        {"assistant", "<|im_start|>assistant\n", "<|im_end|>\n"},
        {"tool", "<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n"},
    };
    for (size_t r = 0; r < 4; r++) {
        for (size_t c = 0; c < sizeof contents / sizeof *contents; c++) {
            struct buf messages = {0}, want = {0};
            buf_printf(
                &messages,
                "[{'role':'user','content':'q'},{'role':'%s',%s},{'role':'user','content':'z'}]",
                roles[r][0], contents[c][0]);
            buf_printf(&want, "%s%s%s%s%s%s", USER("q"), roles[r][1], contents[c][1], roles[r][2],
                       USER("z"), OPEN);
            check(messages.data, NULL, &think, want.data);
            buf_free(&messages);
            buf_free(&want);
        }
    }
}

static void test_errors(void **state)
{
    (void)state;
    check_error(NULL, "No messages provided.");
    check_error("[]", "No messages provided.");
    check_error("{}", "messages must be a list");
    check_error("[1]", "messages[0] must be an object");
    check_error("[{'role':'system','content':'x'},{'role':'assistant','content':'y'}]",
                "No user query found in messages.");
    check_error("[{'role':'user','content':'<tool_response>x</tool_response>'}]",
                "No user query found in messages.");
    check_error("[{'role':'user','content':'x'},{'role':'robot','content':'x'}]",
                "Unexpected message role. (messages[1], role 'robot'");
    check_error("[{'role':'user','content':5}]", "Unexpected content type. (messages[0].content");
    check_error("[{'role':'user','content':[{'type':'input_audio'}]}]",
                "Unexpected item type in content. (messages[0].content[0], type 'input_audio'");
    check_error("[{'role':'user','content':[{'type':'text','text':5}]}]",
                "messages[0].content[0].text must be a string");
    check_error("[{'role':'system','content':[{'type':'image'}]},{'role':'user','content':'x'}]",
                "System message cannot contain images. (messages[0]");
    check_error("[{'role':'system','content':[{'video':1}]},{'role':'user','content':'x'}]",
                "System message cannot contain videos. (messages[0]");
    check_error("[{'role':'user','content':'x'},{'role':'assistant','tool_calls':{}}]",
                "messages[1].tool_calls must be a list");
    check_error(
        "[{'role':'user','content':'x'},{'role':'assistant','tool_calls':[{'function':{}}]}]",
        "messages[1].tool_calls[0] has no function name");
    check_error("[{'role':'user','content':'x'},{'role':'assistant','tool_calls':[{'name':'f','"
                "arguments':[]}]}]",
                "Can only get item pairs from a mapping.");
    check_error("[{'role':'user','content':'x'},{'role':'assistant','tool_calls':[{'name':'f','"
                "arguments':'{'}]}]",
                "messages[1].tool_calls[0].arguments is not valid JSON");
}

static void test_options(void **state)
{
    (void)state;
    struct template_options options = think;
    struct err err = {0};
    json_t *request =
        read_json("{'enable_thinking':null,'chat_template_kwargs':{'enable_thinking':false,"
                  "'preserve_thinking':true,'other':1}}");
    assert_true(template_read_options(request, &options, &err));
    assert_false(options.enable_thinking);
    assert_true(options.preserve_thinking && options.add_generation_prompt);
    json_decref(request);
    request = read_json("{'enable_thinking':'no'}");
    assert_false(template_read_options(request, &options, &err));
    assert_string_equal(err.text, "enable_thinking must be true or false");
    json_decref(request);
}

static void test_python_floats(void **state)
{
    (void)state;
    static const struct {
        double value;
        const char *text;
    } cases[] = {{1.0, "1.0"},
                 {-0.0, "-0.0"},
                 {1e15, "1000000000000000.0"},
                 {1e16, "1e+16"},
                 {0.0001, "0.0001"},
                 {0.00001, "1e-05"},
                 {0.1 + 0.2, "0.30000000000000004"},
                 {5e-324, "5e-324"},
                 {1.7976931348623157e308, "1.7976931348623157e+308"},
                 {1.0 / 17592186044416, "5.684341886080802e-14"},
                 {123456.75, "123456.75"},
                 {-1234.5e20, "-1.2345e+23"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf out = {0};
        pyjson_append_real(&out, cases[i].value);
        assert_string_equal(out.data, cases[i].text);
        buf_free(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_thoughts),
        cmocka_unit_test(test_think_in_content),
        cmocka_unit_test(test_tools),
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_system_anywhere),
        cmocka_unit_test(test_content_forms),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_python_floats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
