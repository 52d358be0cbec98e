/* The prefix cache's second tier: what was kept is there after a restart and after kill -9, and
 * nothing that is damaged or of another model is ever used. */
#include "serving.h"

#include "base/file.h"
#include "engine/disk.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { PROMPTS = 6 };

static const struct scheduler_options without_cache = {.cache_bytes = 1};

/* A slow disk, and one that gives nothing while it is shut: what goes on meanwhile waits for none
 * of it, however slow this machine is. These stand before the C library's. Only whole buffers are
 * held up, so that a log line or a lock file is not. */
struct disk_gate {
    atomic_int slow_ms;
    atomic_bool shut;
    atomic_int waiting, given_up;
};

static struct disk_gate reads, writes;

enum { GATE_MOST_MS = 120000 /* shut for so long: somebody waits for it who must not */ };

static void gate_pass(struct disk_gate *gate, size_t n)
{
    if (n < 1024)
        return;
    if (atomic_load(&gate->slow_ms))
        usleep(1000u * (unsigned)atomic_load(&gate->slow_ms));
    atomic_fetch_add(&gate->waiting, 1);
    for (int ms = 0; atomic_load(&gate->shut); ms++) {
        if (ms == GATE_MOST_MS) {
            atomic_store(&gate->shut, false);
            atomic_fetch_add(&gate->given_up, 1);
        }
        usleep(1000);
    }
    atomic_fetch_sub(&gate->waiting, 1);
}

static void gate_shut(struct disk_gate *gate)
{
    atomic_store(&gate->shut, true);
}

/* Whether it has held until now. */
static bool gate_open(struct disk_gate *gate)
{
    return atomic_exchange(&gate->shut, false) && !atomic_load(&gate->given_up);
}

ssize_t read(int fd, void *bytes, size_t n)
{
    gate_pass(&reads, n);
    return syscall(SYS_read, fd, bytes, n);
}

ssize_t write(int fd, const void *bytes, size_t n)
{
    gate_pass(&writes, n);
    return syscall(SYS_write, fd, bytes, n);
}

struct bench {
    char folder[32];
    struct token_list prompt[PROMPTS];
    struct client cold[PROMPTS];
};

static struct engine *open_tiny(void)
{
    return serve_open(tiny_folder, "cpu/ref", 1024, 128, 1);
}

/* Two families of prompts of up to 700 tokens that begin alike. */
static void bench_open(struct bench *b)
{
    *b = (struct bench){.folder = "/tmp/calla-kept-XXXXXX"};
    assert_non_null(mkdtemp(b->folder));
    struct engine *engine = open_tiny();
    struct scheduler *scheduler = serve_schedule(engine, without_cache);
    for (size_t i = 0; i < PROMPTS; i++) {
        struct token_list own = noise(20 + 90 * i, 10 + i);
        b->prompt[i] = noise(270, i % 2);
        for (size_t j = 0; j < own.len && b->prompt[i].len < 700; j++)
            token_list_push(&b->prompt[i], own.ids[j]);
        token_list_free(&own);
        b->cold[i] = serve_one(scheduler, client_request(&b->prompt[i], 4));
    }
    scheduler_close(scheduler);
    engine_close(engine);
}

static void bench_close(struct bench *b)
{
    for (int i = 0; i < PROMPTS; i++) {
        token_list_free(&b->prompt[i]);
        client_free(&b->cold[i]);
    }
    folder_remove(b->folder);
}

static struct scheduler *schedule(struct bench *b, struct engine *engine, uint64_t bytes,
                                  uint64_t disk_bytes)
{
    return serve_schedule(engine, (struct scheduler_options){.cache_bytes = bytes,
                                                             .cache_dir = b->folder,
                                                             .cache_disk_bytes = disk_bytes});
}

/* Serves prompt i and checks the answer; returns how many tokens were known. */
static uint32_t serve_prompt(struct bench *b, struct scheduler *scheduler, int i)
{
    struct engine_request request = client_request(&b->prompt[i], 4);
    request.keep_at[0] = 270;
    request.keep_at[1] = (uint32_t)b->prompt[i].len - 3;
    struct client c = serve_one(scheduler, request);
    uint32_t cached = c.result.cached_tokens;
    assert_same_answer(&c, &b->cold[i]);
    client_free(&c);
    return cached;
}

static void entries_survive_a_restart(void **unused)
{
    (void)unused;
    struct bench b;
    bench_open(&b);
    for (int start = 0; start < 3; start++) {
        struct engine *engine = open_tiny();
        struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 0);
        for (int i = 0; i < PROMPTS; i++)
            assert_int_equal(serve_prompt(&b, scheduler, i), start   ? b.prompt[i].len - 3
                                                             : i < 2 ? 0
                                                                     : 270);
        scheduler_close(scheduler);
        assert_int_equal(engine->state.free_count, engine->state.limits.pages);
        engine_close(engine);
    }
    bench_close(&b);
}

/* Memory for one entry or two: the rest goes to disk while requests run, and comes back. */
static void what_is_evicted_comes_back(void **unused)
{
    (void)unused;
    struct bench b;
    bench_open(&b);
    struct engine *engine = open_tiny();
    struct scheduler *scheduler = schedule(&b, engine, 4 << 20, 0);
    uint64_t cached = 0;
    for (int round = 0; round < 4; round++)
        for (int i = 0; i < PROMPTS; i++) {
            cached += round ? serve_prompt(&b, scheduler, i) : 0 * serve_prompt(&b, scheduler, i);
            usleep(20000); /* the writer is a thread of its own */
        }
    struct scheduler_stats stats = serve_stats(scheduler);
    assert_true(stats.cache_evictions > 0 && stats.disk_entries > 0 &&
                stats.cache_bytes <= 4 << 20);
    assert_int_equal(serve_failed_stores(&stats), 0);
    uint64_t all = 0;
    for (int i = 0; i < PROMPTS; i++)
        all += 3 * b.prompt[i].len;
    assert_true(cached * 10 >= all * 9);
    scheduler_close(scheduler);
    engine_close(engine);
    bench_close(&b);
}

static uint64_t folder_bytes(const char *folder, int *files)
{
    uint64_t sum = 0;
    DIR *dir = opendir(folder);
    struct dirent *entry;
    *files = 0;
    while ((entry = readdir(dir))) {
        char *path = file_join(folder, entry->d_name);
        struct stat st;
        if (stat(path, &st) == 0 && S_ISREG(st.st_mode)) {
            sum += (uint64_t)st.st_size;
            ++*files;
        }
        free(path);
    }
    closedir(dir);
    return sum;
}

static void the_folder_has_a_limit(void **unused)
{
    (void)unused;
    struct bench b;
    int files;
    bench_open(&b);
    for (int start = 0; start < 2; start++) {
        struct engine *engine = open_tiny();
        struct scheduler *scheduler = schedule(&b, engine, 1 << 28, start ? 3 << 20 : 6 << 20);
        for (int i = 0; i < PROMPTS; i++)
            serve_prompt(&b, scheduler, i);
        scheduler_close(scheduler);
        engine_close(engine);
        assert_in_range(folder_bytes(b.folder, &files), 1 << 20, start ? 3 << 20 : 6 << 20);
    }
    bench_close(&b);
}

/* Cuts or flips something in every file, each time another way. */
static void damage_folder(const char *folder, struct rand *rand)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    while ((entry = readdir(dir))) {
        char *path = file_join(folder, entry->d_name);
        struct stat st;
        FILE *f = NULL;
        if (entry->d_name[0] != '.' && stat(path, &st) == 0 && (f = fopen(path, "r+b"))) {
            long at = (long)rand_below(rand, (uint64_t)st.st_size);
            if (rand_below(rand, 4) == 0) {
                assert_int_equal(ftruncate(fileno(f), at), 0);
            } else {
                at = rand_below(rand, 2) ? at : at % 2000;
                fseek(f, at, SEEK_SET);
                int c = fgetc(f);
                fseek(f, at, SEEK_SET);
                fputc(c ^ (1 << rand_below(rand, 8)), f);
            }
        }
        if (f)
            fclose(f);
        free(path);
    }
    closedir(dir);
}

static void damaged_entries_are_dropped(void **unused)
{
    (void)unused;
    struct bench b;
    struct rand rand = {3};
    int before, after;
    bench_open(&b);
    for (int round = 0; round < rounds_of(40, 5); round++) {
        struct engine *engine = open_tiny();
        struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 0);
        folder_bytes(b.folder, &before);
        for (int i = 0; i < PROMPTS; i++)
            serve_prompt(&b, scheduler, i);
        folder_bytes(b.folder, &after);
        assert_true(round == 0 || after < before);
        scheduler_close(scheduler);
        engine_close(engine);
        damage_folder(b.folder, &rand);
    }
    bench_close(&b);
}

/* Another model of the same sizes finds nothing, and takes nothing away. */
static void models_do_not_share(void **unused)
{
    (void)unused;
    struct bench b;
    uint64_t one, other;
    int files, more;
    bench_open(&b);
    struct engine *engine = open_tiny();
    struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 0);
    for (int i = 0; i < PROMPTS; i++)
        serve_prompt(&b, scheduler, i);
    scheduler_close(scheduler);
    engine_close(engine);
    folder_bytes(b.folder, &files);
    assert_true(disk_hash_model(tiny_folder, &one, NULL));
    assert_true(disk_hash_model("models/demo", &other, NULL));
    assert_true(one != other);
    struct disk *disk;
    struct disk_key *keys = mem_new(701, sizeof *keys);
    assert_true(disk_open(b.folder, 1ull << 32, other, &disk, NULL));
    for (int i = 0; i < PROMPTS; i++) {
        disk_name_prefixes(b.prompt[i].ids, (uint32_t)b.prompt[i].len, keys);
        assert_int_equal(disk_find(disk, keys, 1, (uint32_t)b.prompt[i].len), 0);
    }
    disk_close(disk);
    folder_bytes(b.folder, &more);
    assert_int_equal(more, files);
    free(keys);
    /* A folder that cannot be: the service goes on without. */
    engine = open_tiny();
    char *path = file_join(tiny_folder, "config.json/cache");
    scheduler = serve_schedule(engine, (struct scheduler_options){.cache_dir = path});
    assert_int_equal(serve_prompt(&b, scheduler, 0), 0);
    scheduler_close(scheduler);
    engine_close(engine);
    free(path);
    bench_close(&b);
}

/* A child serves and writes all the time, and is killed at any moment. */
static void a_kill_leaves_nothing_wrong(void **unused)
{
    (void)unused;
    struct bench b;
    struct rand rand = {11};
    uint64_t cached = 0;
    bench_open(&b);
    for (int round = 0; round < rounds_of(200, 8); round++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            struct engine *engine = open_tiny();
            for (;;) { /* closing writes all that is kept */
                struct scheduler *scheduler = schedule(&b, engine, 4 << 20, 24 << 20);
                for (int i = 0; i < PROMPTS; i++)
                    serve_prompt(&b, scheduler, i);
                scheduler_close(scheduler);
            }
        }
        usleep(100000 + (useconds_t)rand_below(&rand, 400000));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        struct engine *engine = open_tiny();
        struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 24 << 20);
        for (int i = 0; i < 2; i++)
            cached += serve_prompt(&b, scheduler, (int)rand_below(&rand, PROMPTS));
        assert_int_equal(serve_stats(scheduler).failed, 0);
        scheduler_close(scheduler);
        engine_close(engine);
    }
    assert_true(cached > 0);
    bench_close(&b);
}

/* Nothing of what a fault may have spoilt is found again, also not what waits to be written. */
static void what_is_dropped_is_gone(void **unused)
{
    (void)unused;
    struct token_list ids = noise(600, 4);
    struct disk_key *keys = mem_new(601, sizeof *keys);
    char folder[] = "/tmp/calla-kept-XXXXXX";
    int files;
    assert_non_null(mkdtemp(folder));
    disk_name_prefixes(ids.ids, 600, keys);
    for (int slow = 0; slow < 2; slow++) {
        struct disk *disk;
        assert_true(disk_open(folder, 1 << 30, 1, &disk, NULL));
        atomic_store(&writes.slow_ms, slow ? 100 : 0);
        for (uint32_t end = 256; end <= 512; end += 256)
            assert_true(disk_write(disk, DISK_PAGE, keys[end], ids.ids + end - 256, 256, end,
                                   mem_new(5000, 1), 5000, true));
        assert_true(disk_write(disk, DISK_SNAPSHOT, keys[600], ids.ids, 600, 600, mem_new(5000, 1),
                               5000, true));
        for (int i = 0; !slow && disk_read_stats(disk).entries < 3 && i < 5000; i++)
            usleep(1000);
        disk_drop(disk, keys, 600);
        if (!slow) {
            assert_false(disk_has(disk, DISK_PAGE, keys[256]));
            assert_false(disk_has(disk, DISK_SNAPSHOT, keys[600]));
        }
        assert_int_equal(disk_find(disk, keys, 1, 600), 0);
        atomic_store(&writes.slow_ms, 0);
        disk_close(disk);
        folder_bytes(folder, &files);
        assert_true(files <= slow); /* the one that was being written */
    }
    folder_remove(folder);
    free(keys);
    token_list_free(&ids);
}

/* ---- a slow disk -------------------------------------------------------------------------- */

/* All prompts are on disk, nothing in memory. */
static void fill_disk(struct bench *b)
{
    struct engine *engine = open_tiny();
    struct scheduler *scheduler = schedule(b, engine, 1 << 28, 0);
    for (int i = 0; i < PROMPTS; i++)
        serve_prompt(b, scheduler, i);
    scheduler_close(scheduler);
    engine_close(engine);
}

static struct engine_request kept_request(struct bench *b, int i)
{
    struct engine_request request = client_request(&b->prompt[i], 4);
    request.keep_at[0] = 270;
    request.keep_at[1] = (uint32_t)b->prompt[i].len - 3;
    return request;
}

/* Steps until the client has ended. */
static void step_until(struct scheduler *scheduler, const struct client *c, uint32_t *steps)
{
    while (!c->ends) {
        ++*steps;
        assert_true(scheduler_step(scheduler) || c->ends);
    }
}

/* Steps until somebody stands at the gate. */
static void step_to_gate(struct scheduler *scheduler, struct disk_gate *gate, uint32_t *steps)
{
    while (!atomic_load(&gate->waiting)) {
        ++*steps;
        assert_true(scheduler_step(scheduler));
    }
}

/* A prompt comes from a disk that does not give it: others answer meanwhile, a token a step. */
static void a_slow_read_stops_nobody(void **unused)
{
    (void)unused;
    struct bench b;
    bench_open(&b);
    fill_disk(&b);
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 4096, 128, 3);
    struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 0);
    struct token_list prompt = noise(25, 99);
    uint32_t steps = 0;
    struct client stream = {.step = &steps}, loading = {0}, same = {0};
    client_submit(&stream, scheduler, client_request(&prompt, 4000));
    while (stream.ids.len < 3 && ++steps)
        scheduler_step(scheduler);
    gate_shut(&reads);
    client_submit(&loading, scheduler, kept_request(&b, 5));
    client_submit(&same, scheduler, kept_request(&b, 5));
    step_to_gate(scheduler, &reads, &steps);
    size_t before = stream.ids.len;
    for (int i = 0; i < 100 && ++steps; i++)
        assert_true(scheduler_step(scheduler));
    assert_int_equal(stream.ids.len - before, 100);
    assert_true(!loading.ends && !same.ends && gate_open(&reads));
    step_until(scheduler, &loading, &steps);
    step_until(scheduler, &same, &steps);
    assert_int_equal(stream.worst_gap_steps, 1);
    assert_int_equal(loading.result.cached_tokens, b.prompt[5].len - 3);
    assert_int_equal(same.result.cached_tokens, b.prompt[5].len - 3);
    assert_same_answer(&loading, &b.cold[5]);
    assert_same_answer(&same, &b.cold[5]);
    assert_int_equal(serve_stats(scheduler).disk_hits, 1); /* the other one found it in memory */
    scheduler_cancel(scheduler, stream.id);
    serve_all(scheduler);
    client_free(&stream);
    client_free(&loading);
    client_free(&same);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    engine_close(engine);
    bench_close(&b);
}

/* Pitfalls 46, 50: cancelled while it loads, and closed while it loads; nothing is left. */
static void loads_can_be_left(void **unused)
{
    (void)unused;
    struct bench b;
    bench_open(&b);
    fill_disk(&b);
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 1024, 128, 2);
    for (int round = 0; round < 8; round++) {
        struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 0);
        struct client c = {0}, other = {0};
        uint32_t steps = 0;
        atomic_store(&reads.slow_ms, 30);
        if (round < 4)
            gate_shut(&reads);
        client_submit(&c, scheduler, kept_request(&b, 4));
        for (int i = 0; i < round % 4; i++)
            scheduler_step(scheduler);
        if (round < 4) {
            scheduler_cancel(scheduler, c.id);
            step_until(scheduler, &c, &steps);
            assert_true(gate_open(&reads));
            assert_int_equal(steps, 1);
            assert_int_equal(c.result.finish, FINISH_CANCELLED);
            client_submit(&other, scheduler, kept_request(&b, 2));
            serve_all(scheduler);
            assert_same_answer(&other, &b.cold[2]);
            client_free(&other);
        }
        scheduler_close(scheduler);
        assert_int_equal(c.ends, 1);
        client_free(&c);
        atomic_store(&reads.slow_ms, 0);
        assert_int_equal(engine->state.free_count, engine->state.limits.pages);
    }
    engine_close(engine);
    bench_close(&b);
}

/* Memory for an entry or two and a disk that takes nothing: what is evicted waits for the writer,
 * and nobody for it. */
static void a_slow_write_stops_nobody(void **unused)
{
    (void)unused;
    struct bench b;
    bench_open(&b);
    struct engine *engine = serve_open(tiny_folder, "cpu/ref", 4096, 128, 2);
    struct scheduler *scheduler = schedule(&b, engine, 4 << 20, 0);
    struct token_list prompt = noise(25, 99);
    uint32_t steps = 0;
    struct client stream = {.step = &steps};
    gate_shut(&writes);
    client_submit(&stream, scheduler, client_request(&prompt, 4000));
    while (stream.ids.len < 3 && ++steps)
        scheduler_step(scheduler);
    for (int i = 0; i < PROMPTS; i++) {
        struct client c = {0};
        client_submit(&c, scheduler, kept_request(&b, i));
        step_until(scheduler, &c, &steps);
        assert_same_answer(&c, &b.cold[i]);
        client_free(&c);
        step_to_gate(scheduler, &writes, &steps);
    }
    assert_int_equal(stream.worst_gap_steps, 1);
    assert_true(serve_stats(scheduler).cache_evictions > 0);
    assert_int_equal(serve_stats(scheduler).disk_entries, 0);
    assert_true(gate_open(&writes));
    scheduler_cancel(scheduler, stream.id);
    serve_all(scheduler);
    client_free(&stream);
    token_list_free(&prompt);
    scheduler_close(scheduler);
    engine_close(engine);
    int files;
    assert_true(folder_bytes(b.folder, &files) > 0 && files > PROMPTS);
    bench_close(&b);
}

/* A disk that gives nothing any more: after ten seconds the prompt is read instead. */
static void a_hung_read_is_given_up(void **unused)
{
    (void)unused;
    if (!long_form())
        skip();
    struct bench b;
    bench_open(&b);
    fill_disk(&b);
    struct engine *engine = open_tiny();
    struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 0);
    atomic_store(&reads.slow_ms, 25000);
    uint64_t start_ns = clock_now_ns();
    assert_int_equal(serve_prompt(&b, scheduler, 5), 0);
    assert_in_range((uint64_t)clock_seconds_since(start_ns), 9, 24);
    atomic_store(&reads.slow_ms, 0);
    scheduler_close(scheduler);
    engine_close(engine);
    bench_close(&b);
}

/* Something else under an entry's name: neither waited for nor read. */
static void entries_of_other_kinds_are_dropped(void **unused)
{
    (void)unused;
    struct bench b;
    bench_open(&b);
    for (int kind = 0; kind < 3; kind++) {
        fill_disk(&b);
        DIR *dir = opendir(b.folder);
        struct dirent *entry;
        while ((entry = readdir(dir))) {
            char *path = file_join(b.folder, entry->d_name);
            if (entry->d_name[0] != '.' && unlink(path) == 0)
                assert_int_equal(kind == 0   ? mkfifo(path, 0600)
                                 : kind == 1 ? symlink("/nowhere", path)
                                             : symlink("/dev/zero", path),
                                 0);
            free(path);
        }
        closedir(dir);
        struct engine *engine = open_tiny();
        struct scheduler *scheduler = schedule(&b, engine, 1 << 28, 0);
        for (int i = 0; i < 2; i++)
            assert_int_equal(serve_prompt(&b, scheduler, i), 0);
        scheduler_close(scheduler);
        engine_close(engine);
        folder_remove(b.folder);
        assert_int_equal(mkdir(b.folder, 0700), 0);
    }
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entries_survive_a_restart),
        cmocka_unit_test(what_is_evicted_comes_back),
        cmocka_unit_test(the_folder_has_a_limit),
        cmocka_unit_test(damaged_entries_are_dropped),
        cmocka_unit_test(models_do_not_share),
        cmocka_unit_test(a_kill_leaves_nothing_wrong),
        cmocka_unit_test(a_slow_read_stops_nobody),
        cmocka_unit_test(loads_can_be_left),
        cmocka_unit_test(a_slow_write_stops_nobody),
        cmocka_unit_test(a_hung_read_is_given_up),
        cmocka_unit_test(entries_of_other_kinds_are_dropped),
        cmocka_unit_test(what_is_dropped_is_gone),
    };
    return cmocka_run_group_tests(tests, tiny_make, tiny_remove);
}
