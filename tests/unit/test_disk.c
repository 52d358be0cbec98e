/* The prefix cache's second tier: what was kept is there after a restart and after kill -9, and
 * nothing that is damaged or of another model is ever used. */
#include "serving.h"

#include "base/file.h"
#include "engine/disk.h"

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { PROMPTS = 6 };

static const struct scheduler_options without_cache = {.cache_bytes = 1};

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
    assert_int_equal(stats.store_failed, 0);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entries_survive_a_restart), cmocka_unit_test(what_is_evicted_comes_back),
        cmocka_unit_test(the_folder_has_a_limit),    cmocka_unit_test(damaged_entries_are_dropped),
        cmocka_unit_test(models_do_not_share),       cmocka_unit_test(a_kill_leaves_nothing_wrong),
    };
    return cmocka_run_group_tests(tests, tiny_make, tiny_remove);
}
