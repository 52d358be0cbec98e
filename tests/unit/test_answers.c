/* What the server makes of what a model writes: the device says what a script says, and each API,
 * streamed and whole, must show the same thought, text and calls of it. */
#include "http.h"

#include "text/parser.h"

#include <jansson.h>

enum { CHAT, CHAT_STREAM, MESSAGES, MESSAGES_STREAM, RESPONSES, RESPONSES_STREAM, FORMS };
enum { STOP_ID = 8174, REPLY_MAX = 1500 /* tokens */ };

static struct bench bench;

/* Each choice of a token is the script's next one, and behind its end the end of the answer. The
 * rest of the model's work is left out: nothing depends on it. */
static struct {
    struct token_list ids;
    atomic_size_t at;
} script;

static void script_argmax(struct device *device, const struct argmax_args *args)
{
    (void)device;
    int32_t *ids = (int32_t *)((char *)args->ids.base + args->ids.offset);
    for (uint32_t i = 0; i < args->rows; i++) {
        size_t at = atomic_fetch_add(&script.at, 1);
        ids[i] = at < script.ids.len ? script.ids.ids[at] : STOP_ID;
    }
}

#define LEAVE_OUT(op)                                                                              \
    static void script_##op(struct device *device, const struct op##_args *args)                   \
    {                                                                                              \
        (void)device;                                                                              \
        (void)args;                                                                                \
    }
LEAVE_OUT(linear)
LEAVE_OUT(delta)
LEAVE_OUT(attention)
LEAVE_OUT(moe_route)
LEAVE_OUT(moe_experts)

static void script_take(struct device_head *head)
{
    head->ops.linear = script_linear;
    head->ops.delta = script_delta;
    head->ops.attention = script_attention;
    head->ops.moe_route = script_moe_route;
    head->ops.moe_experts = script_moe_experts;
    head->ops.argmax = script_argmax;
}

static int setup(void **unused)
{
    (void)unused;
    bench_start(&bench, (struct server_options){0}, script_take);
    return 0;
}

static int teardown(void **unused)
{
    (void)unused;
    bench_close(&bench);
    token_list_free(&script.ids);
    return 0;
}

/* ---- requests ----------------------------------------------------------------------------- */

#define SCHEMA_F                                                                                   \
    "{'type':'object','properties':{'s':{'type':'string'},'i':{'type':'integer'},"                 \
    "'n':{'type':'number'},'b':{'type':'boolean'},'z':{'type':['string','null']},"                 \
    "'a':{'type':'array','items':{'type':'integer'}},'o':{'type':'object'},'e':{'enum':['x']},"    \
    "'any':{}}}"
#define SCHEMA_WRITE                                                                               \
    "{'type':'object','properties':{'path':{'type':'string'},'content':{'type':'string'}}}"

/* JSON with ' for ". */
static char *request_body(int form, bool thinking, uint32_t max_tokens, const char *more)
{
    struct buf body = {0};
    switch (form / 2) {
    case 0:
        buf_printf(&body,
                   "{'messages':[{'role':'user','content':'Go.'}],'temperature':0,'max_tokens':%u,"
                   "'enable_thinking':%s,'tools':[{'type':'function','function':{'name':'f',"
                   "'parameters':" SCHEMA_F "}},{'type':'function','function':{'name':'write',"
                   "'parameters':" SCHEMA_WRITE "}}]",
                   max_tokens, thinking ? "true" : "false");
        break;
    case 1:
        buf_printf(&body,
                   "{'messages':[{'role':'user','content':'Go.'}],'temperature':0,'max_tokens':%u,"
                   "'thinking':{'type':'%s'},'tools':[{'name':'f','input_schema':" SCHEMA_F "},"
                   "{'name':'write','input_schema':" SCHEMA_WRITE "}]",
                   max_tokens, thinking ? "enabled" : "disabled");
        break;
    default:
        buf_printf(&body,
                   "{'input':'Go.','temperature':0,'max_output_tokens':%u,'reasoning':{'effort':"
                   "'%s'},'tools':[{'type':'function','name':'f','parameters':" SCHEMA_F "},"
                   "{'type':'function','name':'write','parameters':" SCHEMA_WRITE "}]",
                   max_tokens, thinking ? "high" : "none");
    }
    buf_printf(&body, "%s,'stream':%s}", more, form % 2 ? "true" : "false");
    for (size_t i = 0; i < body.len; i++)
        if (body.data[i] == '\'')
            body.data[i] = '"';
    return body.data;
}

/* The body of a reply, without the marks of its chunks. */
static struct buf reply_body(const struct buf *reply)
{
    struct buf body = {0};
    const char *p = strstr(reply->data, "\r\n\r\n"), *end = reply->data + reply->len;
    assert_non_null(p);
    bool chunked = memmem(reply->data, (size_t)(p - reply->data), "chunked", 7) != NULL;
    p += 4;
    if (!chunked)
        buf_append(&body, p, (size_t)(end - p));
    while (chunked) {
        char *text;
        size_t n = strtoul(p, &text, 16);
        if (!n)
            break;
        assert_true(text + 2 + n + 2 <= end);
        buf_append(&body, text + 2, n);
        p = text + 2 + n + 2;
    }
    buf_append(&body, "", 1);
    body.len--;
    return body;
}

/* ---- replies ------------------------------------------------------------------------------ */

enum { CALLS_MAX = 64 };

/* What a client has after the reply. */
struct said {
    struct buf thought, text;
    struct {
        struct buf name, args;
        char id[64];
    } calls[CALLS_MAX];
    size_t calls_len;
    char end[32];
};

static void said_add(struct buf *to, const json_t *text)
{
    if (json_is_string(text))
        buf_append(to, json_string_value(text), json_string_length(text));
}

static void said_call(struct said *s, const json_t *id, const json_t *name)
{
    assert_true(s->calls_len < CALLS_MAX);
    assert_true(json_string_length(id) > 5);
    snprintf(s->calls[s->calls_len].id, sizeof s->calls[0].id, "%s", json_string_value(id));
    said_add(&s->calls[s->calls_len++].name, name);
}

static struct buf *said_args(struct said *s)
{
    assert_true(s->calls_len > 0);
    return &s->calls[s->calls_len - 1].args;
}

static const json_t *at(const json_t *value, const char *a, const char *b)
{
    value = json_object_get(value, a);
    return b ? json_object_get(value, b) : value;
}

static void said_end(struct said *s, const json_t *end)
{
    if (json_is_string(end))
        snprintf(s->end, sizeof s->end, "%s", json_string_value(end));
}

/* A message of a chat, or the delta of one. */
static void said_chat(struct said *s, const json_t *reply, const char *where)
{
    const json_t *choice = json_array_get(json_object_get(reply, "choices"), 0), *call;
    const json_t *message = json_object_get(choice, where);
    size_t i;
    said_add(&s->thought, at(message, "reasoning_content", NULL));
    said_add(&s->text, at(message, "content", NULL));
    json_array_foreach(json_object_get(message, "tool_calls"), i, call)
    {
        if (at(call, "id", NULL))
            said_call(s, at(call, "id", NULL), at(call, "function", "name"));
        if (at(call, "index", NULL))
            assert_int_equal(json_integer_value(at(call, "index", NULL)) + 1, s->calls_len);
        said_add(said_args(s), at(call, "function", "arguments"));
    }
    said_end(s, at(choice, "finish_reason", NULL));
}

static void said_message(struct said *s, const json_t *reply)
{
    const json_t *block;
    size_t i;
    json_array_foreach(json_object_get(reply, "content"), i, block)
    {
        said_add(&s->thought, at(block, "thinking", NULL));
        said_add(&s->text, at(block, "text", NULL));
        if (!at(block, "input", NULL))
            continue;
        said_call(s, at(block, "id", NULL), at(block, "name", NULL));
        char *input = json_dumps(at(block, "input", NULL), JSON_COMPACT);
        buf_append_text(said_args(s), input);
        free(input);
    }
    said_end(s, at(reply, "stop_reason", NULL));
}

static void said_message_event(struct said *s, const json_t *event)
{
    const json_t *block = at(event, "content_block", NULL), *delta = at(event, "delta", NULL);
    if (at(block, "input", NULL))
        said_call(s, at(block, "id", NULL), at(block, "name", NULL));
    said_add(&s->thought, at(delta, "thinking", NULL));
    said_add(&s->text, at(delta, "text", NULL));
    if (at(delta, "partial_json", NULL))
        said_add(said_args(s), at(delta, "partial_json", NULL));
    said_end(s, at(delta, "stop_reason", NULL));
}

static void said_response(struct said *s, const json_t *reply)
{
    const json_t *item;
    size_t i;
    json_array_foreach(json_object_get(reply, "output"), i, item)
    {
        const char *type = json_string_value(at(item, "type", NULL));
        const json_t *part = json_array_get(json_object_get(item, "content"), 0);
        if (!strcmp(type, "function_call")) {
            said_call(s, at(item, "call_id", NULL), at(item, "name", NULL));
            said_add(said_args(s), at(item, "arguments", NULL));
        } else {
            said_add(!strcmp(type, "reasoning") ? &s->thought : &s->text, at(part, "text", NULL));
        }
    }
    said_end(s, at(reply, "status", NULL));
}

static void said_response_event(struct said *s, const json_t *event)
{
    const char *type = json_string_value(at(event, "type", NULL));
    const json_t *delta = at(event, "delta", NULL);
    if (!strcmp(type, "response.reasoning_text.delta"))
        said_add(&s->thought, delta);
    else if (!strcmp(type, "response.output_text.delta"))
        said_add(&s->text, delta);
    else if (!strcmp(type, "response.function_call_arguments.delta"))
        said_add(said_args(s), delta);
    else if (!strcmp(type, "response.output_item.added") && at(event, "item", "call_id"))
        said_call(s, at(event, "item", "call_id"), at(event, "item", "name"));
    said_end(s, at(event, "response", "status"));
}

static void said_read(struct said *s, int form, const char *text)
{
    json_error_t why;
    json_t *reply = json_loads(text, 0, &why);
    if (!reply)
        fail_msg("%s: %.200s", why.text, text);
    assert_null(json_object_get(json_object_get(reply, "error"), "message"));
    switch (form) {
    case CHAT:
    case CHAT_STREAM:
        said_chat(s, reply, form == CHAT ? "message" : "delta");
        break;
    case MESSAGES:
        said_message(s, reply);
        break;
    case MESSAGES_STREAM:
        said_message_event(s, reply);
        break;
    case RESPONSES:
        said_response(s, reply);
        break;
    default:
        said_response_event(s, reply);
    }
    json_decref(reply);
}

/* One text of it: R(thought)C(text)name{args}.. and how it ended. */
static char *said_tell(struct said *s)
{
    struct buf out = {0};
    if (s->thought.len)
        buf_printf(&out, "R(%.*s)", (int)s->thought.len, s->thought.data);
    if (s->text.len)
        buf_printf(&out, "C(%.*s)", (int)s->text.len, s->text.data);
    for (size_t i = 0; i < s->calls_len; i++) {
        json_t *args = json_loadb(s->calls[i].args.data, s->calls[i].args.len, 0, NULL);
        assert_true(json_is_object(args));
        char *compact = json_dumps(args, JSON_COMPACT);
        buf_printf(&out, "%.*s%s", (int)s->calls[i].name.len, s->calls[i].name.data, compact);
        free(compact);
        json_decref(args);
        for (size_t k = 0; k < i; k++)
            assert_string_not_equal(s->calls[k].id, s->calls[i].id);
        buf_free(&s->calls[i].name);
        buf_free(&s->calls[i].args);
    }
    static const char *const ends[][2] = {{"stop", "stop"},         {"end_turn", "stop"},
                                          {"completed", "stop"},    {"length", "length"},
                                          {"max_tokens", "length"}, {"incomplete", "length"},
                                          {"tool_calls", "calls"},  {"tool_use", "calls"}};
    const char *end = s->end;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        end = strcmp(s->end, ends[i][0]) ? end : ends[i][1];
    /* Responses tells by its items alone. */
    if (!strcmp(s->end, "completed") && s->calls_len)
        end = "calls";
    buf_printf(&out, " %s", end);
    buf_free(&s->thought);
    buf_free(&s->text);
    return out.data;
}

/* What a client of this form gets for the script. */
static char *ask(int form, bool thinking, uint32_t max_tokens, const char *more)
{
    static const char *const paths[] = {"/v1/chat/completions", "/v1/messages", "/v1/responses"};
    struct buf reply = {0};
    struct said *said = mem_new(1, sizeof *said);
    char *body = request_body(form, thinking, max_tokens, more);
    atomic_store(&script.at, 0);
    int status = client_call(&bench, "POST", paths[form / 2], body, &reply);
    if (status != 200)
        fail_msg("%d: %.*s", status, (int)reply.len, reply.data);
    struct buf text = reply_body(&reply);
    if (form % 2 == 0) {
        said_read(said, form, text.data);
    } else {
        for (char *p = text.data, *line; (line = strsep(&p, "\n"));)
            if (!strncmp(line, "data: {", 7))
                said_read(said, form, line + 6);
    }
    char *told = said_tell(said);
    free(said);
    free(body);
    buf_free(&text);
    buf_free(&reply);
    return told;
}

static void script_add(const char *text)
{
    serve_encode(bench.engine, text, &script.ids);
}

/* All forms tell `want` of the script; null: what the first tells. */
static void check_script(bool thinking, uint32_t max_tokens, const char *want)
{
    char *first = NULL;
    for (int form = 0; form < FORMS; form++) {
        char *told = ask(form, thinking, max_tokens, "");
        assert_string_equal(told, want ? want : first ? first : told);
        if (!first)
            first = told;
        else
            free(told);
    }
    free(first);
    script.ids.len = 0;
}

static void check(bool thinking, const char *text, const char *want)
{
    script_add(text);
    check_script(thinking, REPLY_MAX, want);
}

static void said_on_event(void *user, const struct parser_event *event)
{
    struct said *s = user;
    if (event->kind == PARSER_REASONING)
        buf_append(&s->thought, event->text, event->len);
    else if (event->kind == PARSER_CONTENT)
        buf_append(&s->text, event->text, event->len);
    else if (event->kind == PARSER_CALL_BEGIN)
        buf_append(&s->calls[s->calls_len++].name, event->text, event->len);
    else if (event->kind == PARSER_CALL_ARGS)
        buf_append(said_args(s), event->text, event->len);
}

/* What the parser makes of a text. */
static char *parse(bool thinking, const struct buf *text)
{
    struct said *said = mem_new(1, sizeof *said);
    char *body = request_body(CHAT, thinking, 1, "");
    json_t *request = json_loads(body, 0, NULL);
    struct parser *parser =
        parser_open(&(struct parser_options){.thinking_open = thinking,
                                             .tools = json_object_get(request, "tools"),
                                             .on_event = said_on_event,
                                             .user = said});
    parser_feed(parser, text->data, text->len);
    parser_finish(parser);
    parser_close(parser);
    snprintf(said->end, sizeof said->end, said->calls_len ? "calls" : "stop");
    for (size_t i = 0; i < said->calls_len; i++)
        snprintf(said->calls[i].id, sizeof said->calls[i].id, "%zu", i);
    char *told = said_tell(said);
    json_decref(request);
    free(body);
    free(said);
    return told;
}

/* ---- tests -------------------------------------------------------------------------------- */

#define P(key, value) "<parameter=" key ">\n" value "\n</parameter>\n"
#define F(name, body) "<function=" name ">\n" body "</function>\n"
#define CALL(name, body) "<tool_call>\n" F(name, body) "</tool_call>"

static void test_texts_and_thoughts(void **unused)
{
    (void)unused;
    check(false, "Hello, 日本語 🙂", "C(Hello, 日本語 🙂) stop");
    check(true, "plan\n</think>\n\nHello", "R(plan)C(Hello) stop");
    check(true, "plan", "R(plan) stop");
    check(false, "use </think> to close", "C(use </think> to close) stop");
}

/* Pitfall 23: in a thought that was not closed. */
static void test_call_in_a_thought(void **unused)
{
    (void)unused;
    check(true, "plan text " CALL("f", P("i", "1")), "R(plan text )f{\"i\":1} calls");
    check(true, CALL("f", P("i", "1")), "f{\"i\":1} calls");
    check(true, "a\n" CALL("f", P("i", "1")) "\nb\n</think>\n\nc", "R(a\nb)C(c)f{\"i\":1} calls");
}

/* Pitfalls 29 and 38. */
static void test_calls(void **unused)
{
    (void)unused;
    check(false,
          "I look.\n\n" CALL("f", P("i", "1")) "\n" CALL("f", P("i", "2")) "\n" CALL("f",
                                                                                     P("i", "3")),
          "C(I look.)f{\"i\":1}f{\"i\":2}f{\"i\":3} calls");
    check(false, CALL("write", P("path", "p") P("content", "Use </parameter> to close")),
          "write{\"path\":\"p\",\"content\":\"Use </parameter> to close\"} calls");
    check(false, CALL("f", ""), "f{} calls");
}

/* Pitfalls 31 and 32: nothing that a model leaves out is an error. */
static void test_missing_tags(void **unused)
{
    (void)unused;
    static const char *const texts[] = {
        "<tool_call>\n<function=f>\n<parameter=s>\na\n" P("i", "1") "</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n" P("s", "a") "<parameter=i>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n" P("s", "a") P("i", "1") "</tool_call>",
        "<tool_call>\n<function=f>\n" P("s", "a") P("i", "1"),
        "<tool_call>\n<function=f>\n" P("s", "a") "<parameter=i>\n1",
        F("f", P("s", "a") P("i", "1")),
        F("f", P("s", "a") P("i", "1")) "</tool_call>",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        check(false, texts[i], "f{\"s\":\"a\",\"i\":1} calls");
    check(false, "<function=nobody>\n<parameter=x>\n1\n</parameter>\n</function>",
          "C(<function=nobody>\n<parameter=x>\n1\n</parameter>\n</function>) stop");
    check(false, "<tool_call>\n<function=f>", "C(<tool_call>\n<function=f>) stop");
    /* Cut by the limit after each token: whatever there is by then is told. */
    const char *whole =
        "Text.\n" CALL("write", P("path", "a b c") P("content", "</para </parameter")) "\n" CALL(
            "f", P("a", "[1, 2]") P("z", "null"));
    script_add(whole);
    size_t n = script.ids.len;
    for (size_t cut = 1; cut < n; cut++) {
        script.ids.len = 0;
        script_add(whole);
        check_script(false, (uint32_t)cut, NULL);
    }
}

/* Pitfalls 34 and 35: a file that documents the form, and one that holds a whole call. */
static void test_markup_in_values(void **unused)
{
    (void)unused;
    static const char *const files[][2] = {
        {"Form:\n" P("path", "1") "end", "Form:\\n<parameter=path>\\n1\\n</parameter>\\nend"},
        {"a\n</function>\n<function=f>\n" P("i", "1") "</function>\nb",
         "a\\n</function>\\n<function=f>\\n<parameter=i>\\n1\\n</parameter>\\n</function>\\nb"},
        {"a\n" CALL("f", P("i", "1")) "\nb",
         "a\\n<tool_call>\\n<function=f>\\n<parameter=i>\\n1\\n</parameter>\\n</function>\\n"
         "</tool_call>\\nb"},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        struct buf text = {0}, want = {0};
        buf_printf(&text, CALL("write", P("content", "%s") P("path", "p")), files[i][0]);
        buf_printf(&want, "write{\"content\":\"%s\",\"path\":\"p\"} calls", files[i][1]);
        check(false, text.data, want.data);
        buf_free(&text);
        buf_free(&want);
    }
}

/* Pitfall 37. */
static void test_value_types(void **unused)
{
    (void)unused;
    check(false,
          CALL("f", P("s", "true") P("i", "-12") P("n", "1.5") P("b", "true") P("z", "null")
                        P("a", "[1, 2, 3]") P("o", "{\"a\": {\"b\": [true, null]}, \"c\": \"x\"}")
                            P("e", "x") P("any", "007")),
          "f{\"s\":\"true\",\"i\":-12,\"n\":1.5,\"b\":true,\"z\":null,\"a\":[1,2,3],"
          "\"o\":{\"a\":{\"b\":[true,null]},\"c\":\"x\"},\"e\":\"x\",\"any\":\"007\"} calls");
}

/* Pitfall 40: the client is told of a call that nobody declared; where it wants none, of text. */
static void test_undeclared_calls(void **unused)
{
    (void)unused;
    check(false, CALL("nobody", P("q", "1")), "nobody{\"q\":\"1\"} calls");
    check(true, "plan\n</think>\n\n" CALL("nobody", P("q", "1")),
          "R(plan)nobody{\"q\":\"1\"} calls");
    script_add(CALL("nobody", P("q", "1")));
    for (int form = CHAT; form < FORMS; form++) {
        char *told =
            ask(form, false, REPLY_MAX,
                form / 2 == 1 ? ",'tool_choice':{'type':'none'}" : ",'tool_choice':'none'");
        assert_string_equal(told, "C(" CALL("nobody", P("q", "1")) ") stop");
        free(told);
    }
    script.ids.len = 0;
}

/* Pitfall 28: outputs put together at random; all forms tell what the parser does. */
static void test_random_outputs(void **unused)
{
    (void)unused;
    static const char *const parts[] = {"text",
                                        "\n",
                                        "\n\n",
                                        " ",
                                        "<",
                                        "</think>",
                                        "<think>",
                                        "<tool_call>\n",
                                        "<function=f>\n",
                                        "<function=write>\n",
                                        "<function=nobody>\n",
                                        "<parameter=s>\n",
                                        "<parameter=content>\n",
                                        "\n</parameter>\n",
                                        "</function>\n",
                                        "</tool_call>\n",
                                        CALL("f", P("i", "1") P("s", "x")),
                                        CALL("write", P("content", "é 🙂") P("path", "\"\\")),
                                        F("write", P("path", "p")),
                                        "12",
                                        "[1]",
                                        "é",
                                        "🙂"};
    struct rand rand = {28};
    int rounds = rounds_of(2000, 200);
    for (int i = 0; i < rounds; i++) {
        struct buf text = {0};
        size_t n = 1 + rand_below(&rand, 12);
        for (size_t k = 0; k < n; k++) {
            const char *part = parts[rand_below(&rand, sizeof parts / sizeof *parts)];
            script_add(part);
            buf_append_text(&text, part);
        }
        char *want = parse(i & 1, &text);
        check_script(i & 1, REPLY_MAX, want);
        free(want);
        buf_free(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts_and_thoughts),
        cmocka_unit_test(test_call_in_a_thought),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_missing_tags),
        cmocka_unit_test(test_markup_in_values),
        cmocka_unit_test(test_value_types),
        cmocka_unit_test(test_undeclared_calls),
        cmocka_unit_test(test_random_outputs),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
