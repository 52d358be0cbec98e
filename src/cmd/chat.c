/* calla chat: a conversation on a terminal; one message when the input is not a terminal. */
#include "cmd/cmd.h"
#include "cmd/line.h"
#include "cmd/load.h"
#include "cmd/talk.h"

#include "base/clock.h"
#include "base/file.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char chat_help[] =
    "usage: calla chat [options]\n"
    "\n"
    "Talks with the model on a terminal; /help there lists the commands. When standard input is\n"
    "not a terminal, or with -f, all of it is one message: the answer goes to standard output,\n"
    "without the thoughts before it, and the program ends.\n"
    "\n"
    "  -f, --file FILE      answer the content of FILE and end\n"
    "      --system TEXT    a system message\n"
    "      --think, --no-think  think before answering, or not (default: the model's own)\n"
    "      --keep-thoughts  earlier thoughts stay in the conversation: turns start sooner, "
    "because\n"
    "                       nothing is read twice, but the context fills faster\n"
    "  -n, --tokens N       at most N tokens an answer (default: until the context ends)\n"
    "      --temp T         temperature, 0 is greedy (default: the model's own)\n"
    "      --seed N         same seed, same answers (default: a new one each time)\n" LOAD_HELP
    "  -h, --help           this text\n"
    "\n"
    "Keys: Enter sends. Alt-Enter, or a backslash at the end of a line, starts a new line. A\n"
    "pasted block is one message. Ctrl-C stops an answer and keeps the chat; pressed again, or\n"
    "Ctrl-D, ends it. Messages are remembered in ~/.calla_history.\n"
    "\n"
    "examples:\n"
    "  calla chat --no-think\n"
    "  calla chat -m ~/models/Qwen3.6-35B-A3B-4bit --system 'Answer in one sentence.'\n"
    "  echo 'What is the capital of France?' | calla chat --no-think\n"
    "\n"
    "exit codes: 0 done, 2 wrong usage, 3 unreadable model or input, lost output, 4 not enough\n"
    "memory, context or disk, 5 internal error\n";

static const char chat_commands[] =
    "  /help            this list\n"
    "  /think on|off    think before answering, or not\n"
    "  /system TEXT     set the system message; without TEXT remove it\n"
    "  /reset           forget the conversation, keep the system message\n"
    "  /save FILE       write the conversation as JSON ('calla render' reads it)\n"
    "  /stats           context used, tokens and speed so far\n"
    "  /quit            end (also Ctrl-D)\n"
    "Alt-Enter or a backslash at the end of a line starts a new line; Ctrl-C stops an answer.\n";

struct chat {
    struct engine_options engine;
    const char *file, *system;
    bool think, no_think, keep_thoughts;
    uint64_t tokens, seed;
    double temp; /* NaN: the model's own */

    struct talk talk;
};

static bool chat_is_stopped(void)
{
    return line_interrupts() > 0;
}

/* ---- slash commands ------------------------------------------------------------------------- */

static void chat_do_think(struct chat *chat, const char *rest)
{
    if (!strcmp(rest, "on") || !strcmp(rest, "off"))
        chat->talk.think = !strcmp(rest, "on");
    else if (*rest)
        printf("/think wants on or off\n");
    printf("thinking is %s\n", chat->talk.think ? "on" : "off");
}

static void chat_do_system(struct chat *chat, const char *rest)
{
    struct err err = {0};
    if (!talk_set_system(&chat->talk, rest, strlen(rest), &err))
        printf("%s\n", err.text);
    else
        puts(*rest ? "system message set" : "system message removed");
}

static void chat_do_save(struct chat *chat, const char *rest)
{
    if (!*rest) {
        printf("/save wants the name of a file\n");
        return;
    }
    json_t *request = json_pack("{s:O}", "messages", chat->talk.messages);
    bool ok = json_dump_file(request, rest, JSON_INDENT(2) | JSON_PRESERVE_ORDER) == 0;
    json_decref(request);
    if (ok)
        printf("%zu messages written to %s\n", json_array_size(chat->talk.messages), rest);
    else
        printf("cannot write %s: %s\n", rest, strerror(errno));
}

static void chat_do_stats(const struct chat *chat)
{
    const struct talk *talk = &chat->talk;
    printf("context %u of %u positions; %llu answers, %llu tokens, %.1f tokens/s; backend %s\n",
           talk->context, engine_ctx(talk->engine), (unsigned long long)talk->answers,
           (unsigned long long)talk->tokens,
           talk->seconds > 0 ? (double)talk->tokens / talk->seconds : 0,
           engine_backend(talk->engine));
}

/* Runs a message that is a command, "/" and a word; *quit says that it ends the chat. False for
 * any other message. */
static bool chat_run_command(struct chat *chat, const char *text, bool *quit)
{
    size_t n = 1;
    while (islower((unsigned char)text[n]))
        n++;
    if (text[0] != '/' || n == 1 || (text[n] && !isspace((unsigned char)text[n])))
        return false;
    const char *rest = text + n;
    while (isspace((unsigned char)*rest))
        rest++;
    char *argument = strdup(rest);
    for (size_t k = strlen(argument); k && isspace((unsigned char)argument[k - 1]);)
        argument[--k] = 0;
    char name[16];
    snprintf(name, sizeof name, "%.*s", (int)n - 1, text + 1);
    if (!strcmp(name, "help"))
        fputs(chat_commands, stdout);
    else if (!strcmp(name, "think"))
        chat_do_think(chat, argument);
    else if (!strcmp(name, "system"))
        chat_do_system(chat, argument);
    else if (!strcmp(name, "save"))
        chat_do_save(chat, argument);
    else if (!strcmp(name, "stats"))
        chat_do_stats(chat);
    else if (!strcmp(name, "quit") || !strcmp(name, "exit"))
        *quit = true;
    else if (!strcmp(name, "reset")) {
        talk_reset(&chat->talk);
        printf("the conversation starts anew\n");
    } else
        printf("there is no command /%s; /help lists them. Put a blank before a message that "
               "begins with /.\n",
               name);
    free(argument);
    return true;
}

/* ---- the conversation ----------------------------------------------------------------------- */

static bool chat_is_blank(const char *text)
{
    return text[strspn(text, " \t\r\n")] == 0;
}

/* Talks until the user ends it. An answer that fails does not end the chat. */
static void chat_loop(struct chat *chat, struct line *line)
{
    struct buf text = {0};
    bool warned = false, quit = false;
    while (!quit) {
        enum line_result result = line_read(line, "> ", &text);
        if (result == LINE_END || (result == LINE_INTERRUPT && warned))
            break;
        if (result == LINE_INTERRUPT)
            printf("Ctrl-C again or Ctrl-D ends the chat\n");
        warned = result == LINE_INTERRUPT;
        if (result != LINE_TEXT || chat_is_blank(text.len ? text.data : ""))
            continue;
        if (chat_run_command(chat, text.data, &quit))
            continue;
        struct err err = {0};
        if (!talk_answer(&chat->talk, text.data, text.len, &err))
            printf("calla chat: %s\n", err.text);
        int interrupts = line_take_interrupts();
        warned = interrupts == 1;
        quit = interrupts > 1;
    }
    if (!quit)
        putchar('\n');
    buf_free(&text);
}

static bool chat_on_terminal(struct chat *chat, struct err *err)
{
    const char *home = getenv("HOME");
    char *history = home && *home ? file_join(home, ".calla_history") : NULL;
    struct line *line;
    bool ok = line_open(history, &line, err);
    free(history);
    if (!ok)
        return false;
    chat->talk.stopped = chat_is_stopped;
    const char *model = chat->engine.model ? chat->engine.model : "the demo model";
    printf("Chatting with %s on %s. /help lists commands, Ctrl-D ends.\n", model,
           engine_backend(chat->talk.engine));
    chat_loop(chat, line);
    line_close(line);
    return true;
}

static bool chat_once(struct chat *chat, struct err *err)
{
    enum { MAX_BYTES = 1 << 28 };
    struct buf text = {0};
    bool ok =
        chat->file ? file_read(chat->file, MAX_BYTES, &text, err) : cmd_read_stdin(&text, err);
    if (ok && (!text.len || chat_is_blank(text.data)))
        ok = err_set(err, ERR_USAGE, "there is no message: %s is empty",
                     chat->file ? chat->file : "standard input");
    ok = ok && talk_answer(&chat->talk, text.data, text.len, err);
    buf_free(&text);
    return ok;
}

static bool chat_run(struct chat *chat, struct err *err)
{
    struct engine *engine;
    if (!load_engine(&chat->engine, &engine, err))
        return false;
    struct talk *talk = &chat->talk;
    talk_open(talk, engine);
    talk->think = !chat->no_think && (chat->think || talk->think);
    talk->keep_thoughts = chat->keep_thoughts;
    talk->max_tokens = (uint32_t)chat->tokens;
    talk->colours = isatty(STDOUT_FILENO);
    talk->sampling.seed = chat->seed;
    if (!isnan(chat->temp))
        talk->sampling.temperature = (float)chat->temp;
    bool ok = !chat->system || talk_set_system(talk, chat->system, strlen(chat->system), err);
    if (ok && (chat->file || !isatty(STDIN_FILENO)))
        ok = chat_once(chat, err);
    else if (ok)
        ok = chat_on_terminal(chat, err);
    talk_close(talk);
    engine_close(engine);
    return ok;
}

enum { CHAT_SYSTEM = 256, CHAT_THINK, CHAT_NO_THINK, CHAT_KEEP_THOUGHTS, CHAT_TEMP, CHAT_SEED };

static bool chat_option(struct chat *chat, int c, const char *text, struct err *err)
{
    switch (c) {
    case 'f':
        chat->file = text;
        return true;
    case CHAT_SYSTEM:
        chat->system = text;
        return true;
    case CHAT_THINK:
        chat->think = true;
        return true;
    case CHAT_NO_THINK:
        chat->no_think = true;
        return true;
    case CHAT_KEEP_THOUGHTS:
        chat->keep_thoughts = true;
        return true;
    case 'n':
        return cmd_parse_uint("-n", text, 1, UINT32_MAX, &chat->tokens, err);
    case CHAT_TEMP:
        return cmd_parse_float("--temp", text, 0, 100, &chat->temp, err);
    default:
        return cmd_parse_uint("--seed", text, 0, UINT64_MAX, &chat->seed, err);
    }
}

int cmd_chat(int argc, char **argv)
{
    static const struct option longs[] = {
        LOAD_OPTIONS,
        {"file", required_argument, NULL, 'f'},
        {"tokens", required_argument, NULL, 'n'},
        {"system", required_argument, NULL, CHAT_SYSTEM},
        {"think", no_argument, NULL, CHAT_THINK},
        {"no-think", no_argument, NULL, CHAT_NO_THINK},
        {"keep-thoughts", no_argument, NULL, CHAT_KEEP_THOUGHTS},
        {"temp", required_argument, NULL, CHAT_TEMP},
        {"seed", required_argument, NULL, CHAT_SEED},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct chat chat = {.temp = NAN, .seed = clock_now_ns() % 1000000000};
    struct err err = {0};
    int c;
    while ((c = cmd_next_option(argc, argv, ":m:f:n:h", longs)) != -1) {
        bool taken;
        if (c == 'h') {
            fputs(chat_help, stdout);
            return 0;
        }
        if (c == '?')
            return err_exit_code(ERR_USAGE);
        if (!load_option(c, optarg, &chat.engine, &taken, &err) ||
            (!taken && !chat_option(&chat, c, optarg, &err)))
            return cmd_usage("chat", "%s", err.text);
    }
    if (chat.think && chat.no_think)
        return cmd_usage("chat", "--think and --no-think exclude each other");
    if (optind < argc)
        return cmd_usage("chat", "unexpected argument '%s'; messages come from standard input",
                         argv[optind]);
    return chat_run(&chat, &err) ? 0 : cmd_fail("chat", &err);
}
