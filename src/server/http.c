/* Owns the daemon, its connections and exchanges.
 *
 * Invariant: each connection has one record from its start to its end, and each request one
 * exchange from the handler's first call to http_complete. What a record says about its state is
 * what server_tick judges by: a request that does not arrive, or a reply that is not read, ends
 * with the connection shut down under its thread. */
#include "server/core.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/answer.h"
#include "server/guard.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>

enum {
    HTTP_LAST_WORDS_MS = 1000, /* for streams to end with an error when the server closes */
    HTTP_STACK = 1 << 20,      /* a connection's thread */
    HTTP_HEADERS = 1 << 15,    /* a connection's buffer: bounds its headers */
    HTTP_BODIES = 8,           /* of the largest size may be held at once, or many small ones */
    /* The rest of a body that was replied to without it: bytes, silence, and time in all. */
    HTTP_REST_BYTES = 1 << 30,
    HTTP_REST_SILENT_MS = 2000,
    HTTP_REST_S = 60,
};

enum connection_state { CONNECTION_IDLE, CONNECTION_BODY, CONNECTION_BUSY, CONNECTION_REPLY };

struct connection {
    struct connection *prev, *next;
    int fd;
    _Atomic int state; /* enum connection_state */
    atomic_uint_fast64_t since_ns;
};

static void http_enter(struct connection *c, enum connection_state state)
{
    atomic_store(&c->since_ns, clock_now_ns());
    atomic_store(&c->state, (int)state);
}

void exchange_touch(struct exchange *x)
{
    http_enter(x->record, CONNECTION_REPLY);
}

static void http_on_connection(void *cls, struct MHD_Connection *connection, void **context,
                               enum MHD_ConnectionNotificationCode code)
{
    struct server *server = cls;
    struct connection *c = *context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        c = mem_new(1, sizeof *c);
        c->fd = info ? info->connect_fd : -1;
        http_enter(c, CONNECTION_IDLE);
        *context = c;
        pthread_mutex_lock(&server->lock);
        c->next = server->connections;
        if (c->next)
            c->next->prev = c;
        server->connections = c;
        pthread_mutex_unlock(&server->lock);
        return;
    }
    if (!c)
        return;
    pthread_mutex_lock(&server->lock);
    if (c->next)
        c->next->prev = c->prev;
    if (c->prev)
        c->prev->next = c->next;
    else
        server->connections = c->next;
    pthread_mutex_unlock(&server->lock);
    free(c);
}

void server_tick(struct server *server)
{
    const struct server_options *o = &server->options;
    const uint64_t limits_ms[] = {[CONNECTION_IDLE] = o->arrive_ms,
                                  [CONNECTION_BODY] = o->body_ms,
                                  [CONNECTION_BUSY] = 0,
                                  [CONNECTION_REPLY] = o->stall_ms};
    uint64_t now = clock_now_ns();
    pthread_mutex_lock(&server->lock);
    for (struct connection *c = server->connections; c; c = c->next) {
        uint64_t limit = limits_ms[atomic_load(&c->state)], since = atomic_load(&c->since_ns);
        if (limit && now > since && now - since > limit * 1000000ull)
            shutdown(c->fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&server->lock);
}

static const struct route *http_find_route(const char *method, const char *path, bool *known)
{
    *known = false;
    for (const struct route *r = route_table; r->method; r++) {
        size_t n = strlen(r->path);
        if (strncmp(r->path, path, n) != 0 || (path[n] && !(r->flags & ROUTE_PREFIX)))
            continue;
        *known = true;
        if (!strcmp(r->method, method) || (!strcmp(method, "HEAD") && !strcmp(r->method, "GET")))
            return r;
    }
    return NULL;
}

static struct exchange *http_begin(struct server *server, struct MHD_Connection *connection,
                                   const char *url, const char *method, const char *version)
{
    struct exchange *x = mem_new(1, sizeof *x);
    x->server = server;
    x->connection = connection;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    x->record = info->socket_context;
    x->fd = x->record->fd;
    snprintf(x->method, sizeof x->method, "%s", method);
    snprintf(x->url, sizeof x->url, "%s", url);
    x->interim = strcmp(version, MHD_HTTP_VERSION_1_0) != 0;
    x->start_ns = clock_now_ns();
    x->body.max = server->options.max_body_bytes;
    http_enter(x->record, CONNECTION_BODY);
    return x;
}

static bool http_fail_large(struct exchange *x)
{
    struct fault fault;
    fault_set_status(&fault, 413, "request_too_large", "the body is larger than %llu bytes",
                     (unsigned long long)x->server->options.max_body_bytes);
    return exchange_reply_fault(x, &fault);
}

static bool http_fail_crowded(struct exchange *x)
{
    struct fault fault;
    fault_set_status(&fault, 503, "too_many_bodies",
                     "the requests in work hold as many bytes as they may; try again later");
    return exchange_reply_fault(x, &fault);
}

static void http_release_body(struct exchange *x)
{
    atomic_fetch_sub(&x->server->bodies_bytes, x->body_bytes);
    x->body_bytes = 0;
    buf_free(&x->body);
}

/* Keeps a piece of the body, unless it is past a bound: then none of it is kept. */
static void http_take_body(struct exchange *x, const char *bytes, size_t n)
{
    uint64_t most = HTTP_BODIES * x->server->options.max_body_bytes;
    if (x->too_large || x->crowded)
        return;
    x->body_bytes += n;
    x->crowded = atomic_fetch_add(&x->server->bodies_bytes, n) + n > most;
    buf_append(&x->body, bytes, n);
    x->too_large = x->body.full;
    if (x->too_large || x->crowded)
        http_release_body(x);
}

/* Headers that say where a body ends. */
struct http_framing {
    unsigned lengths, encodings;
    bool unknown;
};

static enum MHD_Result http_note_framing(void *cls, enum MHD_ValueKind kind, const char *name,
                                         const char *value)
{
    struct http_framing *f = cls;
    (void)kind;
    f->lengths += !strcasecmp(name, "Content-Length");
    if (!strcasecmp(name, "Transfer-Encoding")) {
        f->encodings++;
        f->unknown |= !value || strcasecmp(value, "chunked") != 0;
    }
    return MHD_YES;
}

/* What libmicrohttpd lets pass, and others on the way may read otherwise: bodies with two ends. The
 * rest of the connection is anyone's guess. */
static bool http_check_framing(struct exchange *x, struct fault *fault)
{
    struct http_framing f = {0};
    MHD_get_connection_values(x->connection, MHD_HEADER_KIND, http_note_framing, &f);
    x->last = f.unknown || f.lengths + f.encodings > 1;
    if (f.unknown)
        return fault_set_status(fault, 501, NULL, "the only Transfer-Encoding here is chunked");
    return !x->last || fault_set(fault, NULL,
                                 "the headers give the body's length more than once; send one "
                                 "Content-Length, or Transfer-Encoding: chunked");
}

/* What can be said before the body is there; *replied when something was. */
static bool http_check_head(struct exchange *x, bool *replied)
{
    struct fault fault = {0};
    bool known;
    *replied = true;
    x->route = http_find_route(x->method, x->url, &known);
    if (!http_check_framing(x, &fault) || !guard_admit(x, &fault))
        return exchange_reply_fault(x, &fault);
    if (x->server->options.cors && !strcmp(x->method, "OPTIONS"))
        return exchange_reply_text(x, 204, "text/plain", "", 0);
    if (!x->route) {
        fault_set_status(&fault, known ? 405 : 404, NULL,
                         known ? "%s is not a method of %s" : "there is nothing at %s %s",
                         x->method, x->url);
        return exchange_reply_fault(x, &fault);
    }
    const char *length =
        MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Content-Length");
    if (length && strtoull(length, NULL, 10) > x->server->options.max_body_bytes)
        return http_fail_large(x);
    *replied = false;
    return true;
}

static bool http_has_body(struct MHD_Connection *connection)
{
    const char *length = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Content-Length");
    return (length && strtoull(length, NULL, 10)) ||
           MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Transfer-Encoding");
}

/* Counts the request among the running ones; false, with a reply, when the server drains. */
static bool http_admit_running(struct exchange *x)
{
    struct server *server = x->server;
    pthread_mutex_lock(&server->lock);
    x->running = !server->draining;
    server->running += x->running;
    pthread_mutex_unlock(&server->lock);
    if (x->running)
        return true;
    struct fault fault;
    fault_set_status(&fault, 503, "shutting_down", "the server is shutting down");
    exchange_reply_fault(x, &fault);
    return false;
}

static enum MHD_Result http_handle(void *cls, struct MHD_Connection *connection, const char *url,
                                   const char *method, const char *version, const char *upload,
                                   size_t *upload_size, void **context)
{
    struct exchange *x = *context;
    if (!x) {
        bool replied;
        *context = x = http_begin(cls, connection, url, method, version);
        bool ok = http_check_head(x, &replied);
        x->body_unread = replied && (x->last || http_has_body(connection));
        return ok ? MHD_YES : MHD_NO;
    }
    if (x->status) /* replied to already; the rest of its body is not of interest */
        return MHD_YES;
    if (*upload_size) {
        http_take_body(x, upload, *upload_size);
        *upload_size = 0;
        return MHD_YES;
    }
    http_enter(x->record, CONNECTION_BUSY);
    bool ok = true;
    if (x->too_large || x->crowded)
        ok = x->too_large ? http_fail_large(x) : http_fail_crowded(x);
    else if (http_admit_running(x))
        ok = x->route->handle(x);
    http_enter(x->record, CONNECTION_REPLY);
    return ok ? MHD_YES : MHD_NO;
}

/* Closing a socket that holds unread bytes resets the connection, and a client that writes all of
 * its request before it reads, as most do, finds the reset instead of the reply. So the reply's end
 * is sent, and the rest of the request read and dropped. */
static void http_drop_rest(struct exchange *x)
{
    char dropped[1 << 15];
    uint64_t bytes = 0, start_ns = clock_now_ns();
    struct pollfd polled = {.fd = x->fd, .events = POLLIN};
    shutdown(x->fd, SHUT_WR);
    while (bytes < HTTP_REST_BYTES && clock_seconds_since(start_ns) < HTTP_REST_S &&
           poll(&polled, 1, HTTP_REST_SILENT_MS) > 0) {
        ssize_t n = recv(x->fd, dropped, sizeof dropped, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            break;
        bytes += n > 0 ? (uint64_t)n : 0;
    }
}

static void http_log(const struct exchange *x)
{
    char line[1024], more[512] = "";
    if (!x->server->options.log_line)
        return;
    if (x->answer)
        answer_describe(x->answer, more, sizeof more);
    snprintf(line, sizeof line, "%s %s %d %.3fs%s", x->method, x->url, x->status,
             clock_seconds_since(x->start_ns), more);
    for (char *p = line; *p; p++)
        if ((unsigned char)*p < ' ' || *p == 0x7f)
            *p = '?';
    x->server->options.log_line(line);
}

static void http_complete(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_RequestTerminationCode code)
{
    struct server *server = cls;
    struct exchange *x = *context;
    (void)connection;
    if (!x)
        return;
    *context = NULL;
    metrics_count_reply(&server->metrics, x->status ? x->status : 499);
    metrics_observe(&server->metrics.duration, clock_seconds_since(x->start_ns));
    http_log(x);
    if (x->answer) {
        bool whole = code == MHD_REQUEST_TERMINATED_COMPLETED_OK ||
                     code == MHD_REQUEST_TERMINATED_DAEMON_SHUTDOWN;
        atomic_fetch_add(&server->metrics.gone, !whole);
        answer_leave(x->answer);
    }
    if (x->body_unread && code == MHD_REQUEST_TERMINATED_COMPLETED_OK)
        http_drop_rest(x);
    http_enter(x->record, CONNECTION_IDLE);
    http_release_body(x);
    pthread_mutex_lock(&server->lock);
    server->running -= x->running;
    pthread_mutex_unlock(&server->lock);
    free(x);
}

/* A request line has come: from here its headers have their own time. */
static void *http_on_line(void *cls, const char *uri, struct MHD_Connection *connection)
{
    (void)cls;
    (void)uri;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    if (info && info->socket_context)
        http_enter(info->socket_context, CONNECTION_IDLE);
    return NULL;
}

/* A zero byte would end the path before its end: %00 stays as it is. */
static size_t http_unescape(void *cls, struct MHD_Connection *connection, char *text)
{
    (void)cls;
    (void)connection;
    return strstr(text, "%00") ? strlen(text) : MHD_http_unescape(text);
}

static void http_on_log(void *cls, const char *fmt, va_list ap)
{
    char line[512];
    (void)cls;
    vsnprintf(line, sizeof line, fmt, ap);
    line[strcspn(line, "\n")] = 0;
    log_debug("http: %s", line);
}

static bool http_is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == 127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static bool http_listen(struct server *server, struct err *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    const struct server_options *o = &server->options;
    char port[8];
    snprintf(port, sizeof port, "%u", o->port);
    int why = getaddrinfo(o->host, port, &hints, &found);
    if (why)
        return err_set(err, ERR_USAGE, "--host %s: %s", o->host, gai_strerror(why));
    server->loopback = http_is_loopback(found->ai_addr);
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION |
                     MHD_USE_POLL | MHD_USE_ERROR_LOG | MHD_USE_ITC;
    if (found->ai_family == AF_INET6)
        flags |= MHD_USE_IPv6;
    server->daemon = MHD_start_daemon(
        flags, o->port, NULL, NULL, http_handle, server, MHD_OPTION_EXTERNAL_LOGGER, http_on_log,
        NULL, MHD_OPTION_SOCK_ADDR, found->ai_addr, MHD_OPTION_NOTIFY_COMPLETED, http_complete,
        server, MHD_OPTION_NOTIFY_CONNECTION, http_on_connection, server,
        MHD_OPTION_URI_LOG_CALLBACK, http_on_line, server, MHD_OPTION_UNESCAPE_CALLBACK,
        http_unescape, NULL, MHD_OPTION_CONNECTION_LIMIT, o->max_connections,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_HEADERS, MHD_OPTION_THREAD_STACK_SIZE,
        (size_t)HTTP_STACK, MHD_OPTION_END);
    freeaddrinfo(found);
    if (!server->daemon)
        return err_set(err, ERR_USAGE,
                       "cannot listen on %s port %u; is it in use? Choose another with --port",
                       o->host, o->port);
    return true;
}

bool server_open(struct engine *engine, struct scheduler *scheduler,
                 const struct server_options *options, struct server **out, struct err *err)
{
    struct server *server = mem_new(1, sizeof *server);
    server->engine = engine;
    server->scheduler = scheduler;
    server->options = *options;
    struct server_options *o = &server->options;
    o->host = o->host ? o->host : "127.0.0.1";
    o->model_name = o->model_name ? o->model_name : "calla";
    o->max_body_bytes = o->max_body_bytes ? o->max_body_bytes : 32u << 20;
    o->max_connections = o->max_connections ? o->max_connections : 256;
    o->request_timeout_s = o->request_timeout_s ? o->request_timeout_s : 3600;
    o->arrive_ms = o->arrive_ms ? o->arrive_ms : 60000;
    o->body_ms = o->body_ms ? o->body_ms : 120000;
    o->stall_ms = o->stall_ms ? o->stall_ms : 120000;
    o->comment_ms = o->comment_ms ? o->comment_ms : 10000;
    server->started = (int64_t)time(NULL);
    pthread_mutex_init(&server->lock, NULL);
    json_object_seed(0);
    if ((o->trace && !trace_open(o->trace, &server->trace, err)) || !http_listen(server, err)) {
        server_close(server);
        return false;
    }
    *out = server;
    return true;
}

uint16_t server_port(const struct server *server)
{
    const union MHD_DaemonInfo *info =
        MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_BIND_PORT);
    return info ? info->port : server->options.port;
}

uint32_t server_drain(struct server *server)
{
    pthread_mutex_lock(&server->lock);
    server->draining = true;
    uint32_t running = server->running;
    pthread_mutex_unlock(&server->lock);
    return running;
}

void server_close(struct server *server)
{
    if (!server)
        return;
    answer_stop_all(server);
    if (server->daemon) {
        /* What runs says why it ends, where its client listens. */
        for (int i = 0; i < HTTP_LAST_WORDS_MS && server_drain(server); i++)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        MHD_stop_daemon(server->daemon);
    }
    trace_close(server->trace);
    pthread_mutex_destroy(&server->lock);
    free(server);
}
