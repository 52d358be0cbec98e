/* calla serve: the HTTP server. */
#include "cmd/cmd.h"
#include "cmd/load.h"
#include "cmd/store.h"

#include "base/clock.h"
#include "server/server.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char serve_help[] =
    "usage: calla serve [options]\n"
    "\n"
    "Serves a model over HTTP: the OpenAI chat, completions and Responses APIs, Anthropic's\n"
    "messages, and a chat page at /. It stops on ctrl-C, after the answers that are running.\n"
    "\n" LOAD_HELP
    "      --host ADDR    address to bind (default: 127.0.0.1; any other needs a key)\n"
    "      --port N       port (default: 8080; 0: any free one)\n"
    "      --api-key KEY  clients must send it; also from the environment: CALLA_API_KEY\n"
    "      --no-api-key   let others in without a key\n"
    "      --cors ORIGIN  web pages of this origin may ask (\"*\": of any)\n"
    "      --parallel N   sequences at a time (default: 4)\n"
    "      --queue N      requests that may wait (default: 64)\n"
    "      --cache-ram N  bytes for the prefix cache, with K, M or G (default: a tenth of memory,\n"
    "                     at most what is left)\n"
    "      --cache-dir DIR  where the prefix cache is on disk too, over restarts (default:\n"
    "                     calla/prefixes in your cache folder)\n"
    "      --cache-disk N   bytes for that, with K, M or G (default: 16G; 0: not on disk)\n"
    "      --max-body N   bytes of a request, with K, M or G (default: 32M)\n"
    "      --timeout N    seconds that a request may take (default: 3600)\n"
    "      --name NAME    what /v1/models calls the model (default: its folder's name)\n"
    "      --trace FILE   append prompts, cache decisions, raw output and parsed events to FILE\n"
    "      --quiet        no line for each request\n"
    "  -h, --help         this text\n"
    "\n"
    "examples:\n"
    "  calla serve -m mlx-community/Qwen3.6-35B-A3B-4bit\n"
    "  curl localhost:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\",\n"
    "      \"content\": \"What is the capital of France?\"}]}'\n";

enum {
    SERVE_HOST = 256,
    SERVE_PORT,
    SERVE_KEY,
    SERVE_NO_KEY,
    SERVE_CORS,
    SERVE_PARALLEL,
    SERVE_QUEUE,
    SERVE_CACHE,
    SERVE_CACHE_DIR,
    SERVE_CACHE_DISK,
    SERVE_BODY,
    SERVE_TIMEOUT,
    SERVE_NAME,
    SERVE_TRACE,
    SERVE_QUIET,
    SERVE_DRAIN_S = 30,
};

struct serve {
    struct engine_options engine;
    struct scheduler_options scheduler;
    struct server_options server;
    char *cache_dir; /* the default one, or null; owned */
    bool no_key, quiet, no_disk;
};

static int serve_pipe[2] = {-1, -1};

static void serve_on_signal(int number)
{
    int kept = errno;
    char byte = (char)number;
    if (write(serve_pipe[1], &byte, 1) != 1)
        byte = 0; /* the pipe is full of signals already */
    errno = kept;
}

static void serve_log_line(const char *line)
{
    fprintf(stderr, "%s\n", line);
}

static bool serve_number(struct serve *serve, int c, const char *text, struct err *err)
{
    uint64_t n;
    switch (c) {
    case SERVE_PORT:
        if (!cmd_parse_uint("--port", text, 0, 65535, &n, err))
            return false;
        serve->server.port = (uint16_t)n;
        return true;
    case SERVE_PARALLEL:
        if (!cmd_parse_u32("--parallel", text, 1, 256, &serve->engine.parallel, err))
            return false;
        serve->server.parallel = serve->engine.parallel;
        return true;
    case SERVE_QUEUE:
        if (!cmd_parse_u32("--queue", text, 1, 65536, &serve->scheduler.queue, err))
            return false;
        serve->server.queue = serve->scheduler.queue;
        return true;
    default:
        return cmd_parse_u32("--timeout", text, 1, 1000000, &serve->server.request_timeout_s, err);
    }
}

static bool serve_option(struct serve *serve, int c, const char *text, struct err *err)
{
    switch (c) {
    case SERVE_HOST:
        serve->server.host = text;
        return true;
    case SERVE_KEY:
        serve->server.api_key = text;
        return true;
    case SERVE_NO_KEY:
        serve->no_key = true;
        return true;
    case SERVE_CORS:
        serve->server.cors = text;
        return true;
    case SERVE_CACHE:
        return cmd_parse_bytes("--cache-ram", text, 1, &serve->scheduler.cache_bytes, err);
    case SERVE_CACHE_DIR:
        serve->scheduler.cache_dir = text;
        return true;
    case SERVE_CACHE_DISK:
        if (!cmd_parse_bytes("--cache-disk", text, 0, &serve->scheduler.cache_disk_bytes, err))
            return false;
        serve->no_disk = serve->scheduler.cache_disk_bytes == 0;
        return true;
    case SERVE_BODY:
        return cmd_parse_bytes("--max-body", text, 1, &serve->server.max_body_bytes, err);
    case SERVE_NAME:
        serve->server.model_name = text;
        return true;
    case SERVE_TRACE:
        serve->server.trace = text;
        return true;
    case SERVE_QUIET:
        serve->quiet = true;
        return true;
    default:
        return serve_number(serve, c, text, err);
    }
}

static bool serve_is_local(const char *host)
{
    return !host || !strcmp(host, "localhost") || !strcmp(host, "::1") || !strncmp(host, "127.", 4);
}

/* The disk tier is on unless it is turned off or there is no place for it. */
static bool serve_check_disk(struct serve *serve, struct err *err)
{
    struct scheduler_options *o = &serve->scheduler;
    if (serve->no_disk && o->cache_dir)
        return err_set(err, ERR_USAGE, "--cache-disk 0 and --cache-dir exclude each other");
    if (!serve->no_disk && !o->cache_dir) {
        o->cache_dir = serve->cache_dir = store_cache_folder("calla/prefixes");
        if (!o->cache_dir)
            fprintf(stderr, "calla serve: the prefix cache is in memory only: neither "
                            "XDG_CACHE_HOME nor HOME is set; name a folder with --cache-dir\n");
    }
    serve->server.cache_dir = o->cache_dir;
    return true;
}

static bool serve_check(struct serve *serve, int rest, char **argv, struct err *err)
{
    const char *key = getenv("CALLA_API_KEY");
    if (rest)
        return err_set(err, ERR_USAGE, "unexpected argument '%s'", argv[0]);
    if (!serve->server.api_key && key && *key)
        serve->server.api_key = key;
    if (serve->server.api_key && !*serve->server.api_key)
        return err_set(err, ERR_USAGE, "--api-key is empty");
    if (serve->server.api_key && serve->no_key)
        return err_set(err, ERR_USAGE, "--api-key and --no-api-key exclude each other");
    if (!serve_is_local(serve->server.host) && !serve->server.api_key && !serve->no_key)
        return err_set(err, ERR_USAGE,
                       "--host %s lets others in: give a key with --api-key KEY, or say "
                       "--no-api-key",
                       serve->server.host);
    return serve_check_disk(serve, err);
}

/* Waits for a signal while the server works; then until what runs has ended, or a second signal. */
static void serve_wait(struct server *server)
{
    struct pollfd polled = {.fd = serve_pipe[0], .events = POLLIN};
    while (poll(&polled, 1, 1000) <= 0)
        server_tick(server);
    char byte;
    if (read(serve_pipe[0], &byte, 1) != 1)
        return;
    uint64_t start_ns = clock_now_ns();
    uint32_t running = server_drain(server);
    if (running)
        fprintf(stderr, "calla serve: ending after %u running request%s; ctrl-C again ends now\n",
                running, running == 1 ? "" : "s");
    while (server_drain(server) && clock_seconds_since(start_ns) < SERVE_DRAIN_S &&
           poll(&polled, 1, 50) <= 0)
        server_tick(server);
}

static void serve_catch_signals(void)
{
    struct sigaction action = {.sa_handler = serve_on_signal};
    if (pipe(serve_pipe) != 0)
        return;
    for (int i = 0; i < 2; i++) {
        fcntl(serve_pipe[i], F_SETFL, O_NONBLOCK);
        fcntl(serve_pipe[i], F_SETFD, FD_CLOEXEC);
    }
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static bool serve_run(struct serve *serve, struct engine *engine, struct err *err)
{
    struct scheduler *scheduler;
    struct server *server;
    if (!scheduler_open(engine, &serve->scheduler, &scheduler, err))
        return false;
    bool ok = scheduler_start(scheduler, err) &&
              server_open(engine, scheduler, &serve->server, &server, err);
    if (ok) {
        const char *host = serve->server.host ? serve->server.host : "127.0.0.1";
        bool six = strchr(host, ':') != NULL;
        fprintf(stderr, "calla serve: %s on %s, context %u, %u at a time: http://%s%s%s:%u/\n",
                serve->server.model_name, engine_backend(engine), engine_ctx(engine),
                serve->engine.parallel, six ? "[" : "", host, six ? "]" : "", server_port(server));
        serve_wait(server);
        server_close(server);
        /* What is left is to write the cache: a signal may end that, no file is ever half there. */
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
    }
    scheduler_close(scheduler);
    return ok;
}

int cmd_serve(int argc, char **argv)
{
    static const struct option longs[] = {
        LOAD_OPTIONS,
        {"host", required_argument, NULL, SERVE_HOST},
        {"port", required_argument, NULL, SERVE_PORT},
        {"api-key", required_argument, NULL, SERVE_KEY},
        {"no-api-key", no_argument, NULL, SERVE_NO_KEY},
        {"cors", required_argument, NULL, SERVE_CORS},
        {"parallel", required_argument, NULL, SERVE_PARALLEL},
        {"queue", required_argument, NULL, SERVE_QUEUE},
        {"cache-ram", required_argument, NULL, SERVE_CACHE},
        {"cache-dir", required_argument, NULL, SERVE_CACHE_DIR},
        {"cache-disk", required_argument, NULL, SERVE_CACHE_DISK},
        {"max-body", required_argument, NULL, SERVE_BODY},
        {"timeout", required_argument, NULL, SERVE_TIMEOUT},
        {"name", required_argument, NULL, SERVE_NAME},
        {"trace", required_argument, NULL, SERVE_TRACE},
        {"quiet", no_argument, NULL, SERVE_QUIET},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct serve serve = {.engine.parallel = 4,
                          .server = {.port = 8080, .parallel = 4, .queue = 64}};
    struct err err = {0};
    int c;
    while ((c = cmd_next_option(argc, argv, ":m:h", longs)) != -1) {
        bool taken;
        if (c == 'h') {
            fputs(serve_help, stdout);
            return 0;
        }
        if (c == '?')
            return err_exit_code(ERR_USAGE);
        if (!load_option(c, optarg, &serve.engine, &taken, &err) ||
            (!taken && !serve_option(&serve, c, optarg, &err)))
            return cmd_usage("serve", "%s", err.text);
    }
    if (!serve_check(&serve, argc - optind, argv + optind, &err))
        return cmd_usage("serve", "%s", err.text);
    char *folder = NULL;
    if (!load_find(serve.engine.model, &folder, &err))
        return cmd_fail("serve", &err);
    const char *slash = strrchr(folder, '/');
    if (!serve.server.model_name)
        serve.server.model_name = slash && slash[1] ? slash + 1 : folder;
    serve.server.log_line = serve.quiet ? NULL : serve_log_line;
    serve_catch_signals();
    struct engine *engine;
    bool ok = load_engine(&serve.engine, &engine, &err);
    if (ok) {
        ok = serve_run(&serve, engine, &err);
        engine_close(engine);
    }
    free(folder);
    free(serve.cache_dir);
    return ok ? 0 : cmd_fail("serve", &err);
}
