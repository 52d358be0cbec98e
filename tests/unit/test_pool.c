/* The thread pool: every task once, jobs after sleep, no processor time when idle. */
#include "base/clock.h"
#include "base/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { TASKS = 1000 };

struct counts {
    _Atomic int runs[TASKS];
    _Atomic int bad_worker;
    int threads;
};

static void count(void *arg, uint32_t task, int worker)
{
    struct counts *c = arg;
    c->runs[task]++;
    if (worker < 0 || worker >= c->threads)
        c->bad_worker++;
}

static void test_every_task_runs_once(void **state)
{
    (void)state;
    int jobs = getenv("CALLA_TEST_LONG") ? 20000 : 500;
    for (int threads = 1; threads <= 5; threads++) {
        struct pool *pool;
        struct err err;
        assert_true(pool_open(threads, &pool, &err));
        assert_int_equal(pool_threads(pool), threads);
        static struct counts c;
        c.threads = threads;
        for (int job = 0; job < jobs; job++) {
            uint32_t tasks = (uint32_t)(job * 7919) % (job % 10 ? 17 : TASKS);
            for (uint32_t i = 0; i < tasks; i++)
                c.runs[i] = 0;
            pool_run(pool, count, &c, tasks);
            for (uint32_t i = 0; i < tasks; i++)
                assert_int_equal(c.runs[i], 1);
        }
        assert_int_equal(c.bad_worker, 0);
        pool_close(pool);
    }
}

static double process_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void test_idle_costs_nothing_and_wakes(void **state)
{
    (void)state;
    struct pool *pool;
    struct err err;
    assert_true(pool_open(4, &pool, &err));
    static struct counts c;
    c.threads = 4;
    pool_run(pool, count, &c, TASKS);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    double before = process_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    assert_true(process_seconds() - before < 0.02);
    pool_run(pool, count, &c, TASKS);
    for (int i = 0; i < TASKS; i++)
        assert_int_equal(c.runs[i], 2);
    pool_close(pool);
}

static void test_bad_counts_are_refused(void **state)
{
    (void)state;
    struct pool *pool;
    struct err err;
    assert_false(pool_open(-1, &pool, &err));
    assert_int_equal(err.kind, ERR_USAGE);
    assert_false(pool_open(1000000, &pool, &err));
    pool_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_task_runs_once),
        cmocka_unit_test(test_idle_costs_nothing_and_wakes),
        cmocka_unit_test(test_bad_counts_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
