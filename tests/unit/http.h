/* A server of the demo model over HTTP, on a device that a test may change, and its clients. */
#ifndef TESTS_HTTP_H
#define TESTS_HTTP_H

#include "serving.h"

#include "server/server.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <sys/socket.h>

struct bench {
    struct engine *engine;
    struct scheduler *scheduler;
    struct server *server;
    pthread_t ticker;
    atomic_bool closing;
};

static MAYBE_UNUSED void *bench_tick(void *arg)
{
    struct bench *b = arg;
    while (!atomic_load(&b->closing)) {
        server_tick(b->server);
        usleep(20000);
    }
    return NULL;
}

/* `change`: of the device, before anything runs on it; or null. */
static MAYBE_UNUSED void bench_start(struct bench *b, struct server_options options,
                                     void (*change)(struct device_head *head))
{
    struct err err = {0};
    *b = (struct bench){.engine = serve_open("models/demo", NULL, 2048, 128, 2)};
    if (change)
        change((struct device_head *)b->engine->device);
    options.parallel = 2;
    options.queue = 64;
    b->scheduler = serve_schedule(b->engine, (struct scheduler_options){0});
    if (!scheduler_start(b->scheduler, &err) ||
        !server_open(b->engine, b->scheduler, &options, &b->server, &err))
        fail_msg("%s", err.text);
    assert_int_equal(pthread_create(&b->ticker, NULL, bench_tick, b), 0);
}

static MAYBE_UNUSED void bench_close(struct bench *b)
{
    atomic_store(&b->closing, true);
    pthread_join(b->ticker, NULL);
    server_close(b->server);
    scheduler_close(b->scheduler);
    assert_int_equal(b->engine->state.free_count, b->engine->state.limits.pages);
    engine_close(b->engine);
}

/* ---- a client ----------------------------------------------------------------------------- */

static int client_buffer; /* bytes that the next ones receive unread; 0: the system's own */

static MAYBE_UNUSED int client_connect(struct bench *b)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(server_port(b->server)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval patience = {.tv_sec = 60}; /* a reply that never comes fails the test */
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (client_buffer)
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &client_buffer, sizeof client_buffer);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

static MAYBE_UNUSED void client_send(int fd, const char *text, size_t n)
{
    assert_int_equal(send(fd, text, n, MSG_NOSIGNAL), n);
}

/* Sends a request; the caller reads the reply and closes. */
static MAYBE_UNUSED int client_ask(struct bench *b, const char *method, const char *path,
                                   const char *body)
{
    struct buf text = {0};
    int fd = client_connect(b);
    buf_printf(&text, "%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n", method, path);
    buf_printf(&text, "Content-Length: %zu\r\n\r\n%s", strlen(body), body);
    client_send(fd, text.data, text.len);
    buf_free(&text);
    return fd;
}

/* Reads until `mark` has come or the end; false at the end. */
static MAYBE_UNUSED bool client_read(int fd, struct buf *out, const char *mark)
{
    char piece[4096];
    ssize_t n;
    while (!out->data || !mark || !strstr(out->data, mark)) {
        if ((n = recv(fd, piece, sizeof piece, 0)) <= 0)
            return false;
        buf_append(out, piece, (size_t)n);
    }
    return true;
}

/* What comes next, whatever it is. */
static MAYBE_UNUSED bool client_more(int fd, struct buf *out)
{
    char piece[4096];
    ssize_t n = recv(fd, piece, sizeof piece, 0);
    buf_append(out, piece, n > 0 ? (size_t)n : 0);
    return n > 0;
}

/* The whole reply; returns its status. */
static MAYBE_UNUSED int client_call(struct bench *b, const char *method, const char *path,
                                    const char *body, struct buf *out)
{
    int fd = client_ask(b, method, path, body);
    buf_clear(out);
    client_read(fd, out, NULL);
    close(fd);
    return out->len > 12 ? (int)strtol(out->data + 9, NULL, 10) : 0;
}

static MAYBE_UNUSED double bench_metric(struct bench *b, const char *name)
{
    struct buf out = {0};
    char line[80];
    assert_int_equal(client_call(b, "GET", "/metrics", "", &out), 200);
    snprintf(line, sizeof line, "\ncalla_%s ", name);
    const char *at = strstr(out.data, line);
    assert_non_null(at);
    double value = strtod(at + strlen(line), NULL);
    buf_free(&out);
    return value;
}

static MAYBE_UNUSED void bench_wait(struct bench *b, const char *name, double value)
{
    uint64_t start_ns = clock_now_ns();
    while (bench_metric(b, name) != value) {
        if (clock_seconds_since(start_ns) > 20)
            fail_msg("%s is %g, not %g", name, bench_metric(b, name), value);
        usleep(5000);
    }
}

#endif
