/* calla render: a chat request to the exact prompt that the model sees. Needs no model. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "text/template.h"

#include <stdio.h>
#include <stdlib.h>

static const char render_help[] =
    "usage: calla render [--json | --lines] < REQUEST.json\n"
    "\n"
    "Reads a chat request as JSON (messages, tools, chat_template_kwargs, enable_thinking,\n"
    "preserve_thinking, add_vision_id, add_generation_prompt) and prints the prompt that the\n"
    "model sees. The generation prompt is added unless add_generation_prompt is false, and begins "
    "a\n"
    "thought unless enable_thinking is false, whatever the default of a model is.\n"
    "\n"
    "  --json   print one JSON object instead: text; plain, the [start, length] byte ranges that\n"
    "           came from the request and in which no control token is recognised; head_len, the\n"
    "           bytes of the system and tools block; generation_pos, where the generation prompt\n"
    "           begins; thinking_open, whether the prompt ends inside a think block\n"
    "  --lines  a request a line in, a JSON object a line out; {\"error\": ...} for one that "
    "fails\n"
    "  -h, --help  this text\n"
    "\n"
    "examples:\n"
    "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}' | calla render\n"
    "  calla render --json < request.json\n"
    "  calla render --lines < requests.jsonl > prompts.jsonl\n";

static bool render_request(const char *text, size_t n, struct template_prompt *out, struct err *err)
{
    json_error_t why;
    json_t *request = json_loadb(text, n, JSON_ALLOW_NUL, &why);
    if (!request)
        return err_set(err, ERR_INPUT, "the request is not valid JSON: %s (line %d, column %d)",
                       why.text, why.line, why.column);
    struct template_options options = {.add_generation_prompt = true, .enable_thinking = true};
    bool ok = json_is_object(request) ||
              err_set(err, ERR_INPUT, "the request must be a JSON object with \"messages\"");
    ok = ok && template_read_options(request, &options, err) &&
         template_render(json_object_get(request, "messages"), json_object_get(request, "tools"),
                         &options, out, err);
    json_decref(request);
    return ok;
}

static void render_print_json(json_t *object)
{
    json_dumpf(object, stdout, JSON_COMPACT | JSON_PRESERVE_ORDER);
    putchar('\n');
    json_decref(object);
}

static json_t *render_describe(const struct template_prompt *prompt)
{
    json_t *plain = json_array();
    for (size_t i = 0; i < prompt->plain_count; i++)
        json_array_append_new(plain, json_pack("[I,I]", (json_int_t)prompt->plain[i].start,
                                               (json_int_t)prompt->plain[i].len));
    return json_pack("{s:s%,s:o,s:I,s:I,s:b}", "text", prompt->text.data, prompt->text.len, "plain",
                     plain, "head_len", (json_int_t)prompt->head_len, "generation_pos",
                     (json_int_t)prompt->generation_pos, "thinking_open", prompt->thinking_open);
}

static int render_lines(void)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, stdin)) > 0) {
        struct template_prompt prompt;
        struct err err = {0};
        if (render_request(line, (size_t)n, &prompt, &err)) {
            render_print_json(render_describe(&prompt));
            template_prompt_free(&prompt);
        } else {
            render_print_json(json_pack("{s:s}", "error", err.text));
        }
    }
    free(line);
    return 0;
}

static int render_one(bool as_json)
{
    struct buf text = {0};
    struct template_prompt prompt;
    struct err err = {0};
    bool ok = cmd_read_stdin(&text, &err) &&
              render_request(text.data ? text.data : "", text.len, &prompt, &err);
    buf_free(&text);
    if (!ok)
        return cmd_fail("render", &err);
    if (as_json)
        render_print_json(render_describe(&prompt));
    else
        fwrite(prompt.text.data, 1, prompt.text.len, stdout);
    template_prompt_free(&prompt);
    return 0;
}

int cmd_render(int argc, char **argv)
{
    static const struct option options[] = {{"json", no_argument, NULL, 'j'},
                                            {"lines", no_argument, NULL, 'l'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    bool as_json = false, lines = false;
    int c;
    while ((c = cmd_next_option(argc, argv, ":h", options)) != -1) {
        if (c == 'h') {
            fputs(render_help, stdout);
            return 0;
        }
        if (c == '?')
            return err_exit_code(ERR_USAGE);
        as_json |= c == 'j';
        lines |= c == 'l';
    }
    if (optind < argc)
        return cmd_usage("render", "unexpected argument '%s': the request comes on stdin",
                         argv[optind]);
    return lines ? render_lines() : render_one(as_json);
}
