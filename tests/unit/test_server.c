/* The server over HTTP with a device that fails or is slow when told: a fault ends one request with
 * a clear error, silence is broken by comments, and clients that are slow or stand still hold
 * nobody. */
#include "http.h"

#include <math.h>

enum { SLOT = 1 /* of the request that fails: the second one that runs */ };

static struct {
    void (*embed)(struct device *, const struct embed_args *);
    bool (*sync)(struct device *, struct err *);
    atomic_int nan_slot, error_slot, delay_ms; /* slots: -1 is none, 99 is any */
    atomic_bool broken, held;                  /* held: a forward pass does not end */
} faulty;

static bool faulty_has(const struct embed_args *args, int slot)
{
    bool hit = slot == 99;
    for (uint32_t i = 0; i < args->batch->segments; i++)
        hit |= (int)args->batch->host_segments[i].slot == slot;
    return hit;
}

static void faulty_embed(struct device *device, const struct embed_args *args)
{
    faulty.embed(device, args);
    if (atomic_load(&faulty.delay_ms))
        usleep(1000u * (unsigned)atomic_load(&faulty.delay_ms));
    while (atomic_load(&faulty.held))
        usleep(1000);
    if (faulty_has(args, atomic_load(&faulty.error_slot)))
        atomic_store(&faulty.broken, true);
    for (uint32_t i = 0; i < args->batch->segments; i++)
        if ((int)args->batch->host_segments[i].slot == atomic_load(&faulty.nan_slot)) {
            const struct segment *segment = &args->batch->host_segments[i];
            uint32_t row = segment->row + segment->rows - 1, width = args->table->cols;
            float *x = (float *)((char *)args->x.base + args->x.offset) + (size_t)row * width;
            x[0] = NAN;
        }
}

static bool faulty_sync(struct device *device, struct err *err)
{
    bool good = faulty.sync(device, err);
    if (!atomic_exchange(&faulty.broken, false))
        return good;
    return err_set(err, ERR_RESOURCE, "out of device memory");
}

static void faulty_take(struct device_head *head)
{
    faulty.embed = head->ops.embed;
    faulty.sync = head->calls.sync;
    head->ops.embed = faulty_embed;
    head->calls.sync = faulty_sync;
}

static void bench_open(struct bench *b, struct server_options options)
{
    atomic_store(&faulty.nan_slot, -1);
    atomic_store(&faulty.error_slot, -1);
    atomic_store(&faulty.delay_ms, 0);
    atomic_store(&faulty.held, false);
    bench_start(b, options, faulty_take);
}

#define ASK "\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]"
#define PLAIN "{" ASK ", \"reasoning_effort\": \"none\", \"temperature\": 0, \"max_tokens\": 20"
/* Never ends by itself. */
#define ENDLESS                                                                                    \
    "{" ASK ", \"reasoning_effort\": \"none\", \"stream\": true, \"logit_bias\": "                 \
    "{\"8172\": -100, \"8174\": -100}"

static const char good[] = "The capital of France is Paris.";

static void check_good(struct bench *b)
{
    struct buf out = {0};
    assert_int_equal(client_call(b, "POST", "/v1/chat/completions", PLAIN "}", &out), 200);
    assert_non_null(strstr(out.data, good));
    buf_free(&out);
}

/* ---- faults ------------------------------------------------------------------------------- */

static const struct {
    const char *path, *body, *streamed, *whole_mark, *stream_mark;
} apis[] = {
    {"/v1/chat/completions", PLAIN "}", PLAIN ", \"stream\": true}", "{\"error\":{\"message\":\"",
     "data: {\"error\":{\"message\":\""},
    {"/v1/completions", "{\"prompt\": \"a b c\"}", "{\"prompt\": \"a b c\", \"stream\": true}",
     "{\"error\":{\"message\":\"", "data: {\"error\":{\"message\":\""},
    {"/v1/messages", "{" ASK ", \"max_tokens\": 20}",
     "{" ASK ", \"max_tokens\": 20, \"stream\": true}",
     "{\"type\":\"error\",\"error\":{\"type\":\"api_error\"",
     "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\""},
    {"/v1/responses", "{\"input\": \"a b c\"}", "{\"input\": \"a b c\", \"stream\": true}",
     "{\"error\":{\"message\":\"", "event: response.failed\n"},
};

/* Pitfalls 86, 88, 106, 109: a NaN, and a device that runs out of memory in the midst of a prompt
 * or of an answer: a 500 or an error event in each API's form, for the request that caused it
 * alone. */
static void a_fault_ends_one_request(void **unused)
{
    (void)unused;
    struct bench b;
    struct buf out = {0}, beside = {0};
    bench_open(&b, (struct server_options){0});
    check_good(&b);
    double failed = 0;
    for (size_t i = 0; i < 4 * sizeof apis / sizeof *apis; i++) {
        bool nan = i % 2, streamed = i / 2 % 2;
        const char *path = apis[i / 4].path,
                   *body = streamed ? apis[i / 4].streamed : apis[i / 4].body;
        int stream = client_ask(&b, "POST", "/v1/chat/completions", ENDLESS "}");
        assert_true(client_read(stream, &beside, "Paris"));
        atomic_store(nan ? &faulty.nan_slot : &faulty.error_slot, SLOT);
        assert_int_equal(client_call(&b, "POST", path, body, &out), streamed ? 200 : 500);
        atomic_store(nan ? &faulty.nan_slot : &faulty.error_slot, -1);
        assert_non_null(
            strstr(out.data, streamed ? apis[i / 4].stream_mark : apis[i / 4].whole_mark));
        assert_non_null(strstr(out.data, nan ? "not a number" : "out of device memory"));
        failed++;
        assert_true(bench_metric(&b, "requests_failed_total") == failed);
        /* the other stream goes on, and the slot that failed serves the same request */
        buf_clear(&beside);
        assert_true(client_read(stream, &beside, "\"content\":"));
        assert_int_equal(client_call(&b, "POST", path, apis[i / 4].body, &out), 200);
        check_good(&b);
        close(stream);
        buf_clear(&beside);
        bench_wait(&b, "running", 0);
    }
    buf_free(&out);
    buf_free(&beside);
    bench_close(&b);
}

/* In the midst of an answer, after text has been sent. */
static void a_fault_in_an_answer_is_an_event(void **unused)
{
    (void)unused;
    struct bench b;
    struct buf out = {0};
    bench_open(&b, (struct server_options){0});
    for (int nan = 0; nan < 2; nan++) {
        int fd = client_ask(&b, "POST", "/v1/chat/completions", ENDLESS "}");
        assert_true(client_read(fd, &out, "Paris"));
        atomic_store(nan ? &faulty.nan_slot : &faulty.error_slot, 0);
        assert_false(client_read(fd, &out, NULL));
        atomic_store(nan ? &faulty.nan_slot : &faulty.error_slot, -1);
        close(fd);
        assert_non_null(strstr(out.data, "data: {\"error\":"));
        assert_non_null(strstr(out.data, "data: [DONE]\n\n"));
        buf_clear(&out);
        check_good(&b);
    }
    buf_free(&out);
    bench_close(&b);
}

/* Pitfall 86: a device that fails for good shows in /health, and so does its recovery. */
static void health_follows_the_device(void **unused)
{
    (void)unused;
    struct bench b;
    struct buf out = {0};
    bench_open(&b, (struct server_options){0});
    check_good(&b);
    assert_int_equal(client_call(&b, "GET", "/health", "", &out), 200);
    atomic_store(&faulty.error_slot, 99);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(client_call(&b, "POST", "/v1/chat/completions", PLAIN "}", &out), 500);
        assert_non_null(strstr(out.data, "out of device memory"));
    }
    assert_int_equal(client_call(&b, "GET", "/health", "", &out), 503);
    assert_non_null(strstr(out.data, "\"status\":\"unhealthy\""));
    assert_true(bench_metric(&b, "faults_in_a_row") >= 3);
    atomic_store(&faulty.error_slot, -1);
    check_good(&b);
    assert_int_equal(client_call(&b, "GET", "/health", "", &out), 200);
    assert_true(bench_metric(&b, "faults_in_a_row") == 0);
    buf_free(&out);
    bench_close(&b);
}

/* ---- silence, slowness -------------------------------------------------------------------- */

static size_t count(const char *text, const char *what)
{
    size_t n = 0;
    for (; text && (text = strstr(text, what)); text += strlen(what))
        n++;
    return n;
}

/* The interval is a tenth of a second here: a prompt that takes longer is no silence. */
static void silence_is_broken_by_comments(void **unused)
{
    (void)unused;
    struct bench b;
    struct buf out = {0};
    bench_open(&b, (struct server_options){.comment_ms = 100});
    check_good(&b);
    for (size_t i = 0; i < sizeof apis / sizeof *apis; i++) {
        atomic_store(&faulty.held, true); /* headers do not wait for the prompt */
        int fd = client_ask(&b, "POST", apis[i].path, apis[i].streamed);
        assert_true(client_read(fd, &out, "200 OK"));
        while (count(out.data, ": still working\n\n") < 2)
            assert_true(client_read(fd, &out, ": still working\n\n") && client_more(fd, &out));
        atomic_store(&faulty.held, false);
        assert_false(client_read(fd, &out, NULL));
        close(fd);
        buf_clear(&out);
    }
    /* and where something is sent more often, there are none */
    uint64_t start_ns = clock_now_ns();
    assert_int_equal(client_call(&b, "POST", apis[0].path, apis[0].streamed, &out), 200);
    assert_true(count(out.data, "still working") <= clock_seconds_since(start_ns) / 0.1);
    buf_free(&out);
    bench_close(&b);
}

/* Who writes no more is asked now and then whether they still read, and nobody else is. */
static void who_writes_no_more_is_probed(void **unused)
{
    (void)unused;
    struct bench b;
    struct buf out = {0};
    bench_open(&b, (struct server_options){.comment_ms = 100});
    check_good(&b);
    for (size_t i = 0; i < 2 * sizeof apis / sizeof *apis; i++) {
        bool half = i % 2;
        atomic_store(&faulty.delay_ms, 450);
        int fd = client_ask(&b, "POST", apis[i / 2].path, apis[i / 2].body);
        if (half)
            shutdown(fd, SHUT_WR);
        while (half && count(out.data, "HTTP/1.1 100 Continue\r\n\r\n") < 3)
            assert_true(client_more(fd, &out));
        atomic_store(&faulty.delay_ms, half ? 0 : 150);
        client_read(fd, &out, NULL);
        close(fd);
        assert_int_equal(count(out.data, "HTTP/1.1 200 OK\r\n"), 1);
        assert_true(half || !strstr(out.data, "100 Continue"));
        buf_clear(&out);
    }
    /* One that left is found by the first of them. */
    atomic_store(&faulty.delay_ms, 100);
    for (int i = 0; i < 5; i++) {
        double gone = bench_metric(&b, "clients_gone_total");
        close(client_ask(&b, "POST", "/v1/chat/completions",
                         "{" ASK ", \"logit_bias\": {\"8172\": -100, \"8174\": -100}}"));
        bench_wait(&b, "clients_gone_total", gone + 1);
        bench_wait(&b, "running", 0);
    }
    buf_free(&out);
    bench_close(&b);
}

/* Waits for the other side to close; the seconds that it took. */
static double client_wait_end(int fd)
{
    char piece[256];
    uint64_t start_ns = clock_now_ns();
    while (recv(fd, piece, sizeof piece, 0) > 0)
        ;
    close(fd);
    return clock_seconds_since(start_ns);
}

static void what_does_not_arrive_is_cut_off(void **unused)
{
    (void)unused;
    static const char head[] = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                               "Content-Length: 1000\r\n\r\n";
    struct bench b;
    bench_open(&b, (struct server_options){.arrive_ms = 300, .body_ms = 300});
    int idle = client_connect(&b), line = client_connect(&b), body = client_connect(&b);
    client_send(line, head, 30);
    client_send(body, head, sizeof head - 1);
    check_good(&b);
    assert_true(client_wait_end(idle) < 5);
    assert_true(client_wait_end(line) < 5);
    assert_true(client_wait_end(body) < 5);
    /* a byte now and then does not help */
    for (size_t part = 30; part <= sizeof head - 1; part += sizeof head - 31) {
        int fd = client_connect(&b);
        uint64_t start_ns = clock_now_ns();
        client_send(fd, head, part);
        while (send(fd, part == 30 ? "x" : " ", 1, MSG_NOSIGNAL) == 1) {
            assert_true(clock_seconds_since(start_ns) < 5);
            usleep(50000);
        }
        close(fd);
    }
    check_good(&b);
    bench_close(&b);
}

/* A client that reads nothing of its stream: the engine goes on, and in the end it is cut off. */
static void a_stalled_reader_is_cut_off(void **unused)
{
    (void)unused;
    struct bench b;
    bench_open(&b, (struct server_options){.stall_ms = 500});
    client_buffer = 4096;
    int fd = client_ask(&b, "POST", "/v1/chat/completions",
                        ENDLESS ", \"logprobs\": true, \"top_logprobs\": 20}");
    client_buffer = 0;
    bench_wait(&b, "running", 1);
    for (int i = 0; i < 5; i++)
        check_good(&b);
    bench_wait(&b, "running", 0);
    usleep(1500000);
    assert_true(client_wait_end(fd) < 2); /* what was on its way, and the end */
    check_good(&b);
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fault_ends_one_request),
        cmocka_unit_test(a_fault_in_an_answer_is_an_event),
        cmocka_unit_test(health_follows_the_device),
        cmocka_unit_test(silence_is_broken_by_comments),
        cmocka_unit_test(who_writes_no_more_is_probed),
        cmocka_unit_test(what_does_not_arrive_is_cut_off),
        cmocka_unit_test(a_stalled_reader_is_cut_off),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
