/* Owns the messages. Invariant: between calls they are a conversation that the template accepts: a
 * system message or none, then user and assistant messages in turn. */
#include "cmd/talk.h"

#include "base/clock.h"
#include "text/parser.h"
#include "text/template.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The answer that is being written. */
struct talk_turn {
    struct talk *talk;
    struct parser *parser;
    struct buf content, thought, name, arguments;
    json_t *calls; /* or null */
    bool dim;      /* the terminal shows dimmed text */
    bool printed;  /* something of the answer */
    int lost;      /* errno of the write that stdout refused, or 0 */
    bool progress; /* a progress line stands on stderr */
    uint64_t start_ns;
};

void talk_open(struct talk *talk, struct engine *engine)
{
    *talk = (struct talk){
        .engine = engine,
        .sampling = engine_sampling(engine),
        .think = engine_thinks(engine),
        .messages = json_array(),
    };
}

void talk_close(struct talk *talk)
{
    json_decref(talk->messages);
    talk->messages = NULL;
}

static bool talk_has_system(const struct talk *talk)
{
    const json_t *role = json_object_get(json_array_get(talk->messages, 0), "role");
    return role && !strcmp(json_string_value(role), "system");
}

static json_t *talk_message(const char *role, const char *text, size_t n)
{
    json_t *content = json_stringn(n ? text : "", n);
    return content ? json_pack("{s:s, s:o}", "role", role, "content", content) : NULL;
}

void talk_reset(struct talk *talk)
{
    size_t keep = talk_has_system(talk);
    while (json_array_size(talk->messages) > keep)
        json_array_remove(talk->messages, keep);
    talk->context = 0;
}

bool talk_set_system(struct talk *talk, const char *text, size_t n, struct err *err)
{
    json_t *message = talk_message("system", text, n);
    if (!message)
        return err_set(err, ERR_INPUT, "the system message is not UTF-8 text");
    if (talk_has_system(talk))
        json_array_remove(talk->messages, 0);
    if (n)
        json_array_insert(talk->messages, 0, message);
    json_decref(message);
    return true;
}

/* What the model writes goes to a terminal without the characters that would steer it. */
static void talk_print(struct talk_turn *turn, const char *text, size_t n, bool dim)
{
    if (turn->talk->colours) {
        if (turn->dim != dim)
            fputs(dim ? "\033[2m" : "\033[0m", stdout);
        turn->dim = dim;
    } else if (dim) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        bool steers = turn->talk->colours && (c == 0x7f || (c < 0x20 && c != '\n' && c != '\t'));
        putchar(steers ? '?' : c);
    }
    turn->printed = true;
}

static void talk_end_call(struct talk_turn *turn)
{
    if (!turn->calls)
        turn->calls = json_array();
    json_array_append_new(turn->calls,
                          json_pack("{s:s, s:{s:s%, s:s%}}", "type", "function", "function", "name",
                                    turn->name.data, turn->name.len, "arguments",
                                    turn->arguments.data, turn->arguments.len));
    talk_print(turn, ")", 1, false);
}

static void talk_on_event(void *user, const struct parser_event *event)
{
    struct talk_turn *turn = user;
    switch (event->kind) {
    case PARSER_REASONING:
        buf_append(&turn->thought, event->text, event->len);
        talk_print(turn, event->text, event->len, true);
        break;
    case PARSER_CONTENT:
        if (!turn->content.len && turn->thought.len)
            talk_print(turn, "\n\n", 2, true);
        buf_append(&turn->content, event->text, event->len);
        talk_print(turn, event->text, event->len, false);
        break;
    case PARSER_CALL_BEGIN:
        buf_clear(&turn->name);
        buf_clear(&turn->arguments);
        buf_append(&turn->name, event->text, event->len);
        if (turn->printed)
            talk_print(turn, "\n", 1, false);
        talk_print(turn, event->text, event->len, false);
        talk_print(turn, "(", 1, false);
        break;
    case PARSER_CALL_ARGS:
        buf_append(&turn->arguments, event->text, event->len);
        talk_print(turn, event->text, event->len, false);
        break;
    case PARSER_CALL_END:
        talk_end_call(turn);
        break;
    }
}

static void talk_clear_progress(struct talk_turn *turn)
{
    if (turn->progress)
        fputs("\r\033[K", stderr);
    turn->progress = false;
}

static bool talk_may_go_on(const struct talk_turn *turn)
{
    return !turn->lost && !(turn->talk->stopped && turn->talk->stopped());
}

static bool talk_on_prefill(void *user, uint32_t done, uint32_t total)
{
    struct talk_turn *turn = user;
    if (isatty(STDERR_FILENO) && clock_seconds_since(turn->start_ns) > 0.5) {
        fprintf(stderr, "\rreading the prompt: %u of %u tokens\033[K", done, total);
        turn->progress = true;
    }
    return talk_may_go_on(turn);
}

static void talk_flush(struct talk_turn *turn)
{
    if (fflush(stdout) != 0 && !turn->lost)
        turn->lost = errno;
}

static bool talk_on_token(void *user, const struct engine_token *token)
{
    struct talk_turn *turn = user;
    talk_clear_progress(turn);
    parser_feed(turn->parser, token->text, token->len);
    talk_flush(turn);
    return talk_may_go_on(turn);
}

/* The prompt of the conversation as it stands, and what of it the next turn will begin with. */
static bool talk_encode(const struct talk *talk, struct token_list *ids, uint32_t keep_at[2],
                        bool *thinking, struct err *err)
{
    const struct tokenizer *tokenizer = engine_tokenizer(talk->engine);
    struct template_options options = {
        .add_generation_prompt = true,
        .enable_thinking = talk->think,
        .preserve_thinking = talk->keep_thoughts,
    };
    struct template_prompt prompt;
    if (!tokenizer)
        return err_set(err, ERR_INPUT, "the model folder has no tokenizer.json: it cannot chat");
    if (!template_render(talk->messages, NULL, &options, &prompt, err))
        return false;
    *thinking = prompt.thinking_open;
    bool ok = template_tokenize(&prompt, tokenizer, ids, keep_at, err);
    template_prompt_free(&prompt);
    return ok;
}

static void talk_print_statistics(const struct engine_result *result)
{
    static const char *const ends[] = {[FINISH_STOP] = "",
                                       [FINISH_LENGTH] = ", cut at the limit",
                                       [FINISH_CANCELLED] = ", stopped"};
    const char *dim = isatty(STDERR_FILENO) ? "\033[2m" : "", *plain = *dim ? "\033[0m" : "";
    size_t n = result->ids.len;
    double rate = n > 1 && result->decode_s > 0 ? (double)(n - 1) / result->decode_s : 0;
    fprintf(stderr,
            "%s[prompt %u tokens, %u of them known, %.2f s; answer %zu tokens, %.1f/s%s]%s\n", dim,
            result->prompt_tokens, result->cached_tokens, result->prefill_s, n, rate,
            ends[result->finish], plain);
}

static void talk_count(struct talk *talk, const struct engine_result *result)
{
    talk->answers++;
    talk->tokens += result->ids.len;
    talk->seconds += result->decode_s;
    talk->context = result->prompt_tokens + (uint32_t)result->ids.len;
}

/* The finished turn becomes the assistant's message. */
static void talk_keep(struct talk *talk, struct talk_turn *turn)
{
    json_t *message = talk_message("assistant", turn->content.data, turn->content.len);
    if (!message)
        message = talk_message("assistant", "", 0);
    json_object_set_new(
        message, "reasoning_content",
        json_stringn(turn->thought.len ? turn->thought.data : "", turn->thought.len));
    if (turn->calls)
        json_object_set(message, "tool_calls", turn->calls);
    json_array_append_new(talk->messages, message);
}

static bool talk_generate(struct talk *talk, const struct token_list *prompt,
                          const uint32_t keep_at[2], bool thinking, struct talk_turn *turn,
                          struct err *err)
{
    struct engine_result result;
    struct parser_options parsing = {
        .thinking_open = thinking, .on_event = talk_on_event, .user = turn};
    struct engine_request request = {
        .prompt = prompt->ids,
        .prompt_len = prompt->len,
        .keep_at = {keep_at[0], keep_at[1]},
        .max_tokens = talk->max_tokens,
        .sampling = talk->sampling,
        .on_token = talk_on_token,
        .on_prefill = talk_on_prefill,
        .user = turn,
    };
    request.sampling.seed += talk->answers;
    turn->parser = parser_open(&parsing);
    turn->start_ns = clock_now_ns();
    bool ok = engine_generate(talk->engine, &request, &result, err);
    talk_clear_progress(turn);
    if (ok)
        parser_finish(turn->parser);
    parser_close(turn->parser);
    talk_print(turn, "\n", turn->printed || !talk->colours, false);
    talk_flush(turn);
    if (!ok)
        return false;
    talk_keep(talk, turn);
    talk_count(talk, &result);
    talk_print_statistics(&result);
    token_list_free(&result.ids);
    errno = turn->lost;
    return !turn->lost || err_set_errno(err, "cannot write standard output");
}

bool talk_answer(struct talk *talk, const char *text, size_t n, struct err *err)
{
    json_t *message = talk_message("user", text, n);
    if (!message)
        return err_set(err, ERR_INPUT, "the message is not UTF-8 text");
    json_array_append_new(talk->messages, message);
    struct token_list prompt = {0};
    struct talk_turn turn = {.talk = talk};
    bool thinking = false;
    size_t at = json_array_size(talk->messages) - 1;
    uint32_t keep_at[2] = {0};
    bool ok = talk_encode(talk, &prompt, keep_at, &thinking, err) &&
              talk_generate(talk, &prompt, keep_at, thinking, &turn, err);
    if (!ok && json_array_size(talk->messages) == at + 1)
        json_array_remove(talk->messages, at);
    token_list_free(&prompt);
    json_decref(turn.calls);
    buf_free(&turn.content);
    buf_free(&turn.thought);
    buf_free(&turn.name);
    buf_free(&turn.arguments);
    return ok;
}
