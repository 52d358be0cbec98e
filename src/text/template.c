/* Owns the prompt while it is built. The control flow follows chat_template.jinja statement by
 * statement, so that the same request fails at the same place with the same words.
 *
 * Invariant: every byte of the prompt is either written here (control text) or lies in a `plain`
 * range (it came from the request); contents keep that split through joining, trimming and
 * cutting. */
#include "text/template.h"

#include "base/mem.h"
#include "base/utf8.h"
#include "text/pyjson.h"
#include "text/word.h"

#include <stdlib.h>
#include <string.h>

static const char template_tools_open[] =
    "# Tools\n\nYou have access to the following functions:\n\n<tools>";

static const char template_tools_close[] =
    "\n</tools>\n\n"
    "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
    "</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second parameter\n"
    "that can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\n"
    "Reminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block "
    "must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the "
    "function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n</IMPORTANT>";

/* A rendered content: text and which of it came from the request. */
struct content {
    struct buf text;
    struct text_range *plain;
    size_t count, cap;
};

/* A stretch of a content. */
struct slice {
    const struct content *of;
    size_t start, len;
};

struct template_run {
    const json_t *messages;
    const struct template_options *options;
    struct template_prompt *out;
    size_t images, videos; /* seen so far, for add_vision_id */
    size_t leading;        /* system messages that open the conversation */
    size_t last_query;
    struct content content;   /* of the message at hand */
    struct content reasoning; /* of the message at hand, when sent by itself */
};

/* Notes that [start, start + len) is plain; stretches that touch become one. */
static void ranges_add(struct text_range **ranges, size_t *count, size_t *cap, size_t start,
                       size_t len)
{
    if (!len)
        return;
    if (*count) {
        struct text_range *last = &(*ranges)[*count - 1];
        if (last->start + last->len == start) {
            last->len += len;
            return;
        }
    }
    if (*count == *cap) {
        *cap = *cap ? 2 * *cap : 16;
        *ranges = mem_grow(*ranges, *cap, sizeof **ranges);
    }
    (*ranges)[(*count)++] = (struct text_range){start, len};
}

static void content_clear(struct content *c)
{
    buf_clear(&c->text);
    c->count = 0;
}

static void content_add_plain(struct content *c, const char *text, size_t n)
{
    ranges_add(&c->plain, &c->count, &c->cap, c->text.len, n);
    buf_append(&c->text, text, n);
}

static void content_free(struct content *c)
{
    buf_free(&c->text);
    free(c->plain);
}

/* Python's str.isspace(). */
static bool template_is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

static const char *slice_text(struct slice s)
{
    return s.len ? s.of->text.data + s.start : "";
}

static struct slice slice_trim(struct slice s)
{
    const char *p = slice_text(s);
    uint32_t cp;
    while (s.len) {
        size_t k = utf8_decode(p, s.len, &cp);
        if (!k || !template_is_space(cp))
            break;
        p += k;
        s.start += k;
        s.len -= k;
    }
    while (s.len) {
        size_t k = 1;
        while (k < s.len && k < 4 && ((unsigned char)p[s.len - k] & 0xc0) == 0x80)
            k++;
        if (utf8_decode(p + s.len - k, k, &cp) != k || !template_is_space(cp))
            break;
        s.len -= k;
    }
    return s;
}

static struct slice slice_skip_newlines(struct slice s)
{
    for (; s.len && *slice_text(s) == '\n'; s.start++)
        s.len--;
    return s;
}

static struct slice slice_drop_newlines(struct slice s)
{
    while (s.len && slice_text(s)[s.len - 1] == '\n')
        s.len--;
    return s;
}

static bool slice_starts(struct slice s, const char *text)
{
    size_t n = strlen(text);
    return s.len >= n && !memcmp(slice_text(s), text, n);
}

static bool slice_ends(struct slice s, const char *text)
{
    size_t n = strlen(text);
    return s.len >= n && !memcmp(slice_text(s) + s.len - n, text, n);
}

/* Offset of the first (or last) `text` in s; s.len when there is none. */
static size_t slice_find(struct slice s, const char *text, bool last)
{
    size_t n = strlen(text), found = s.len;
    const char *p = slice_text(s), *end = p + s.len;
    for (const char *at = p; (at = memmem(at, (size_t)(end - at), text, n)); at += n) {
        found = (size_t)(at - p);
        if (!last)
            break;
    }
    return found;
}

static void template_add(struct template_run *run, const char *text)
{
    buf_append_text(&run->out->text, text);
}

static void template_add_plain(struct template_run *run, const char *text, size_t n)
{
    struct template_prompt *out = run->out;
    ranges_add(&out->plain, &out->plain_count, &out->plain_cap, out->text.len, n);
    buf_append(&out->text, text, n);
}

static void template_add_slice(struct template_run *run, struct slice s)
{
    struct template_prompt *out = run->out;
    for (size_t i = 0; i < s.of->count; i++) {
        size_t a = s.of->plain[i].start, b = a + s.of->plain[i].len;
        if (a < s.start)
            a = s.start;
        if (b > s.start + s.len)
            b = s.start + s.len;
        if (a < b)
            ranges_add(&out->plain, &out->plain_count, &out->plain_cap, out->text.len + a - s.start,
                       b - a);
    }
    buf_append(&out->text, slice_text(s), s.len);
}

static bool template_is_role(const json_t *message, const char *role)
{
    return word_is(json_object_get(message, "role"), role);
}

static bool template_is_system(const json_t *message)
{
    return template_is_role(message, "system") || template_is_role(message, "developer");
}

/* One element of a content list. */
static bool template_read_part(struct template_run *run, size_t index, size_t part,
                               const json_t *item, bool count, struct err *err)
{
    const json_t *message = json_array_get(run->messages, index);
    const json_t *type = json_object_get(item, "type");
    const json_t *text = json_object_get(item, "text");
    bool image = json_object_get(item, "image") || json_object_get(item, "image_url") ||
                 word_is(type, "image");
    bool video = json_object_get(item, "video") || word_is(type, "video");
    if (image || video) {
        if (template_is_system(message))
            return err_set(err, ERR_USAGE, "System message cannot contain %s. (messages[%zu])",
                           image ? "images" : "videos", index);
        size_t *seen = image ? &run->images : &run->videos;
        *seen += count;
        if (run->options->add_vision_id)
            buf_printf(&run->content.text, "%s %zu: ", image ? "Picture" : "Video", *seen);
        buf_append_text(&run->content.text, image ? "<|vision_start|><|image_pad|><|vision_end|>"
                                                  : "<|vision_start|><|video_pad|><|vision_end|>");
        return true;
    }
    if (!text)
        return err_set(err, ERR_USAGE,
                       "Unexpected item type in content. (messages[%zu].content[%zu], type '%s': "
                       "send text parts)",
                       index, part, word_shown(type));
    if (!json_is_string(text))
        return err_set(err, ERR_USAGE, "messages[%zu].content[%zu].text must be a string", index,
                       part);
    content_add_plain(&run->content, json_string_value(text), json_string_length(text));
    return true;
}

/* The trimmed content of message `index`, valid until the next call. `count`: pictures and videos
 * get numbers. */
static bool template_read_content(struct template_run *run, size_t index, bool count,
                                  struct slice *out, struct err *err)
{
    struct content *c = &run->content;
    const json_t *content = json_object_get(json_array_get(run->messages, index), "content");
    content_clear(c);
    if (json_is_string(content)) {
        content_add_plain(c, json_string_value(content), json_string_length(content));
    } else if (json_is_array(content)) {
        for (size_t i = 0; i < json_array_size(content); i++)
            if (!template_read_part(run, index, i, json_array_get(content, i), count, err))
                return false;
    } else if (content && !json_is_null(content)) {
        return err_set(err, ERR_USAGE,
                       "Unexpected content type. (messages[%zu].content: send a string or a list "
                       "of parts)",
                       index);
    }
    *out = slice_trim((struct slice){c, 0, c->text.len});
    return true;
}

/* Writes the leading system messages as one text; *any says whether there was any. */
static bool template_add_leading(struct template_run *run, const char *before, bool *any,
                                 struct err *err)
{
    *any = false;
    for (size_t i = 0; i < run->leading; i++) {
        struct slice content;
        if (!template_read_content(run, i, false, &content, err))
            return false;
        if (!content.len)
            continue;
        template_add(run, *any ? "\n\n" : before);
        template_add_slice(run, content);
        *any = true;
    }
    return true;
}

/* The system turn: tools, then the leading system messages. */
static bool template_add_head(struct template_run *run, const json_t *tools, struct err *err)
{
    bool any;
    if (json_array_size(tools)) {
        template_add(run, "<|im_start|>system\n");
        template_add(run, template_tools_open);
        for (size_t i = 0; i < json_array_size(tools); i++) {
            template_add(run, "\n");
            size_t start = run->out->text.len;
            pyjson_append(&run->out->text, json_array_get(tools, i));
            ranges_add(&run->out->plain, &run->out->plain_count, &run->out->plain_cap, start,
                       run->out->text.len - start);
        }
        template_add(run, template_tools_close);
        if (!template_add_leading(run, "\n\n", &any, err))
            return false;
        template_add(run, "<|im_end|>\n");
    } else if (run->leading) {
        template_add(run, "<|im_start|>system\n");
        if (!template_add_leading(run, "", &any, err))
            return false;
        template_add(run, "<|im_end|>\n");
    }
    run->out->head_len = run->out->text.len;
    return true;
}

/* Finds the last user message that is not a wrapped tool result: thoughts after it are kept. */
static bool template_find_query(struct template_run *run, struct err *err)
{
    for (size_t i = json_array_size(run->messages); i-- > 0;) {
        if (!template_is_role(json_array_get(run->messages, i), "user"))
            continue;
        struct slice content;
        if (!template_read_content(run, i, false, &content, err))
            return false;
        if (slice_starts(content, "<tool_response>") && slice_ends(content, "</tool_response>"))
            continue;
        run->last_query = i;
        return true;
    }
    return err_set(err, ERR_USAGE, "No user query found in messages.");
}

/* The arguments of a call as a new reference to an object; null with an error. */
static json_t *template_read_arguments(const json_t *arguments, const char *where, struct err *err)
{
    if (!arguments)
        return json_object();
    if (json_is_object(arguments))
        return json_incref((json_t *)arguments);
    json_t *object = NULL;
    if (json_is_string(arguments)) {
        const char *text = json_string_value(arguments);
        size_t n = json_string_length(arguments);
        if (strspn(text, " \t\r\n") == n)
            return json_object();
        json_error_t why;
        object = json_loadb(text, n, JSON_ALLOW_NUL, &why);
        if (!object) {
            err_set(err, ERR_USAGE, "%s.arguments is not valid JSON: %s (line %d, column %d)",
                    where, why.text, why.line, why.column);
            return NULL;
        }
    }
    if (json_is_object(object))
        return object;
    json_decref(object);
    err_set(err, ERR_USAGE,
            "Can only get item pairs from a mapping. (%s.arguments must be an object or the JSON "
            "text of one)",
            where);
    return NULL;
}

static bool template_add_call(struct template_run *run, const json_t *call, const char *where,
                              const char *before, struct err *err)
{
    const json_t *function = json_object_get(call, "function");
    if (function)
        call = function;
    const json_t *name = json_object_get(call, "name");
    if (!json_is_string(name))
        return err_set(err, ERR_USAGE, "%s has no function name", where);
    json_t *arguments = template_read_arguments(json_object_get(call, "arguments"), where, err);
    if (!arguments)
        return false;
    template_add(run, before);
    template_add(run, "<tool_call>\n<function=");
    template_add_plain(run, json_string_value(name), json_string_length(name));
    template_add(run, ">\n");
    const char *key;
    json_t *value;
    json_object_foreach(arguments, key, value)
    {
        template_add(run, "<parameter=");
        template_add_plain(run, key, strlen(key));
        template_add(run, ">\n");
        if (json_is_string(value)) {
            template_add_plain(run, json_string_value(value), json_string_length(value));
        } else {
            size_t start = run->out->text.len;
            pyjson_append(&run->out->text, value);
            ranges_add(&run->out->plain, &run->out->plain_count, &run->out->plain_cap, start,
                       run->out->text.len - start);
        }
        template_add(run, "\n</parameter>\n");
    }
    json_decref(arguments);
    template_add(run, "</function>\n</tool_call>");
    return true;
}

/* Splits an answer into thought and text.
 *
 * With `reasoning_content` the content stays whole, whatever it holds. Without it, a literal
 * </think> in the content is taken for the end of a thought, because clients that replay an answer
 * as one text rely on that and the official template does it. An assistant message that talks about
 * the tag and must be kept whole therefore needs `reasoning_content`, be it "". */
static void template_split_thought(struct template_run *run, const json_t *message,
                                   struct slice *content, struct slice *thought)
{
    const json_t *reasoning = json_object_get(message, "reasoning_content");
    content_clear(&run->reasoning);
    *thought = (struct slice){&run->reasoning, 0, 0};
    if (json_is_string(reasoning)) {
        content_add_plain(&run->reasoning, json_string_value(reasoning),
                          json_string_length(reasoning));
        thought->len = run->reasoning.text.len;
    } else {
        static const char open[] = "<think>", close[] = "</think>";
        size_t first = slice_find(*content, close, false);
        if (first < content->len) {
            size_t last = slice_find(*content, close, true) + strlen(close);
            *thought = slice_drop_newlines((struct slice){content->of, content->start, first});
            size_t from = slice_find(*thought, open, true);
            if (from < thought->len) {
                thought->start += from + strlen(open);
                thought->len -= from + strlen(open);
            }
            content->start += last;
            content->len -= last;
            *content = slice_skip_newlines(*content);
        }
    }
    *thought = slice_trim(*thought);
}

static bool template_add_assistant(struct template_run *run, size_t index, struct slice content,
                                   struct err *err)
{
    const json_t *message = json_array_get(run->messages, index);
    struct slice thought;
    template_split_thought(run, message, &content, &thought);
    template_add(run, "<|im_start|>assistant\n");
    if (run->options->preserve_thinking || index > run->last_query) {
        template_add(run, "<think>\n");
        template_add_slice(run, thought);
        template_add(run, "\n</think>\n\n");
    }
    template_add_slice(run, content);
    const json_t *calls = json_object_get(message, "tool_calls");
    if (calls && !json_is_null(calls) && !json_is_array(calls))
        return err_set(err, ERR_USAGE, "messages[%zu].tool_calls must be a list", index);
    for (size_t i = 0; i < json_array_size(calls); i++) {
        char where[80];
        snprintf(where, sizeof where, "messages[%zu].tool_calls[%zu]", index, i);
        const char *before = i ? "\n" : slice_trim(content).len ? "\n\n" : "";
        if (!template_add_call(run, json_array_get(calls, i), where, before, err))
            return false;
    }
    template_add(run, "<|im_end|>\n");
    return true;
}

static void template_add_result(struct template_run *run, size_t index, struct slice content)
{
    size_t last = json_array_size(run->messages) - 1;
    if (index && !template_is_role(json_array_get(run->messages, index - 1), "tool"))
        template_add(run, "<|im_start|>user");
    template_add(run, "\n<tool_response>\n");
    template_add_slice(run, content);
    template_add(run, "\n</tool_response>");
    if (index == last || !template_is_role(json_array_get(run->messages, index + 1), "tool"))
        template_add(run, "<|im_end|>\n");
}

static bool template_add_message(struct template_run *run, size_t index, struct err *err)
{
    const json_t *message = json_array_get(run->messages, index);
    struct slice content;
    if (!template_read_content(run, index, true, &content, err))
        return false;
    if (template_is_role(message, "assistant"))
        return template_add_assistant(run, index, content, err);
    bool user = template_is_role(message, "user");
    if (user || template_is_system(message)) {
        if (!user && index < run->leading)
            return true;
        template_add(run, user ? "<|im_start|>user\n" : "<|im_start|>system\n");
        template_add_slice(run, content);
        template_add(run, "<|im_end|>\n");
        return true;
    }
    if (template_is_role(message, "tool")) {
        template_add_result(run, index, content);
        return true;
    }
    return err_set(err, ERR_USAGE,
                   "Unexpected message role. (messages[%zu], role '%s': use system, developer, "
                   "user, assistant or tool)",
                   index, word_shown(json_object_get(message, "role")));
}

static void template_add_generation(struct template_run *run)
{
    run->out->generation_pos = run->out->text.len;
    if (!run->options->add_generation_prompt)
        return;
    template_add(run, "<|im_start|>assistant\n");
    run->out->thinking_open = run->options->enable_thinking;
    template_add(run, run->options->enable_thinking ? "<think>\n" : "<think>\n\n</think>\n\n");
}

static bool template_run_all(struct template_run *run, const json_t *tools, struct err *err)
{
    size_t n = json_array_size(run->messages);
    if (run->messages && !json_is_null(run->messages) && !json_is_array(run->messages))
        return err_set(err, ERR_USAGE, "messages must be a list of messages");
    if (!n)
        return err_set(err, ERR_USAGE, "No messages provided.");
    if (tools && !json_is_null(tools) && !json_is_array(tools))
        return err_set(err, ERR_USAGE, "tools must be a list of tool definitions");
    for (size_t i = 0; i < n; i++)
        if (!json_is_object(json_array_get(run->messages, i)))
            return err_set(err, ERR_USAGE, "messages[%zu] must be an object", i);
    while (run->leading < n && template_is_system(json_array_get(run->messages, run->leading)))
        run->leading++;
    if (!template_add_head(run, tools, err) || (run->leading < n && !template_find_query(run, err)))
        return false;
    for (size_t i = 0; i < n; i++)
        if (!template_add_message(run, i, err))
            return false;
    template_add_generation(run);
    if (run->out->text.full || run->content.text.full || run->reasoning.text.full)
        return err_set(err, ERR_RESOURCE, "the conversation is longer than %d MB as a prompt",
                       BUF_MAX_DEFAULT >> 20);
    return true;
}

bool template_render(const json_t *messages, const json_t *tools,
                     const struct template_options *options, struct template_prompt *out,
                     struct err *err)
{
    *out = (struct template_prompt){0};
    struct template_run run = {.messages = messages, .options = options, .out = out};
    bool ok = template_run_all(&run, tools, err);
    content_free(&run.content);
    content_free(&run.reasoning);
    if (!ok)
        template_prompt_free(out);
    return ok;
}

static bool template_read_flags(const json_t *object, const char *where,
                                struct template_options *options, struct err *err)
{
    const struct {
        const char *name;
        bool *value;
    } flags[] = {
        {"add_generation_prompt", &options->add_generation_prompt},
        {"enable_thinking", &options->enable_thinking},
        {"preserve_thinking", &options->preserve_thinking},
        {"add_vision_id", &options->add_vision_id},
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        const json_t *value = json_object_get(object, flags[i].name);
        if (!value || json_is_null(value))
            continue;
        if (!json_is_boolean(value))
            return err_set(err, ERR_USAGE, "%s%s must be true or false", where, flags[i].name);
        *flags[i].value = json_is_true(value);
    }
    return true;
}

bool template_read_options(const json_t *request, struct template_options *options, struct err *err)
{
    const json_t *kwargs = json_object_get(request, "chat_template_kwargs");
    if (kwargs && !json_is_null(kwargs) && !json_is_object(kwargs))
        return err_set(err, ERR_USAGE, "chat_template_kwargs must be an object");
    return template_read_flags(kwargs, "chat_template_kwargs.", options, err) &&
           template_read_flags(request, "", options, err);
}

/* Tokens of text[start..end), whose ends are at control tokens: cutting there changes none. */
static bool template_tokenize_part(const struct template_prompt *prompt,
                                   const struct tokenizer *tokenizer, size_t start, size_t end,
                                   struct token_list *out, struct err *err)
{
    struct text_range *plain = mem_new(prompt->plain_count + 1, sizeof *plain);
    size_t count = 0;
    for (size_t i = 0; i < prompt->plain_count; i++) {
        struct text_range r = prompt->plain[i];
        if (r.start >= start && r.start + r.len <= end)
            plain[count++] = (struct text_range){r.start - start, r.len};
    }
    bool ok =
        tokenizer_encode(tokenizer, prompt->text.data + start, end - start, plain, count, out, err);
    free(plain);
    return ok;
}

bool template_tokenize(const struct template_prompt *prompt, const struct tokenizer *tokenizer,
                       struct token_list *out, uint32_t keep_at[2], struct err *err)
{
    size_t end[3] = {prompt->head_len, prompt->generation_pos, prompt->text.len}, start = 0;
    for (int i = 0; i < 3; start = end[i++]) {
        if (!template_tokenize_part(prompt, tokenizer, start, end[i], out, err))
            return false;
        if (i < 2)
            keep_at[i] = (uint32_t)out->len;
    }
    return true;
}

void template_prompt_free(struct template_prompt *prompt)
{
    buf_free(&prompt->text);
    free(prompt->plain);
    *prompt = (struct template_prompt){0};
}
