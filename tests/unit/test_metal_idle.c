/* How long the Metal device's memory stays claimed: the policy alone, without a device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../../src/backend/metal/metal_idle.c"

#include <unistd.h>

enum { KEEP_MS = 60 };

static int holds, releases, changes; /* written under the lock of the policy */

static void hold(struct device *device)
{
    (void)device;
    holds++;
}

static void let_go(struct device *device)
{
    (void)device;
    releases++;
}

static void change(struct device *device)
{
    (void)device;
    assert_int_equal(holds, 0); /* buffers are added before they are claimed */
    changes++;
}

static struct metal_idle *open_policy(uint32_t keep_ms)
{
    struct metal_idle *idle = NULL;
    struct err err = {0};
    holds = releases = changes = 0;
    assert_true(metal_idle_open(NULL, hold, let_go, keep_ms, &idle, &err));
    return idle;
}

/* Waits until *counter is at least `wanted`, for five seconds at most; returns the time it took. */
static uint64_t wait_for(struct metal_idle *idle, const int *counter, int wanted)
{
    uint64_t start = clock_now_ns();
    for (int i = 0; i < 5000; i++) {
        pthread_mutex_lock(&idle->lock);
        bool there = *counter >= wanted;
        pthread_mutex_unlock(&idle->lock);
        if (there)
            return clock_now_ns() - start;
        usleep(1000);
    }
    fail_msg("nothing happened");
    return 0;
}

static void test_released_once_after_the_last_use(void **state)
{
    (void)state;
    struct metal_idle *idle = open_policy(KEEP_MS);
    metal_idle_use(idle, change);
    uint64_t ns = wait_for(idle, &releases, 1);
    assert_true(ns >= (KEEP_MS - 10) * 1000000ull);
    usleep(3 * KEEP_MS * 1000);
    metal_idle_close(idle);
    assert_int_equal(changes, 1);
    assert_true(holds >= 1);
    assert_int_equal(releases, 1); /* neither again while idle nor at the end */
}

static void test_claimed_again_by_the_next_use(void **state)
{
    (void)state;
    struct metal_idle *idle = open_policy(KEEP_MS);
    metal_idle_use(idle, NULL);
    wait_for(idle, &releases, 1);
    int before = holds;
    metal_idle_use(idle, NULL);
    assert_true(holds > before);
    wait_for(idle, &releases, 2);
    metal_idle_close(idle);
    assert_int_equal(releases, 2);
}

static void test_renewed_while_in_use_and_released_at_the_end(void **state)
{
    (void)state;
    struct metal_idle *idle = open_policy(60000);
    metal_idle_use(idle, NULL);
    wait_for(idle, &holds, 2); /* the period is half a second */
    assert_int_equal(releases, 0);
    metal_idle_close(idle);
    assert_int_equal(releases, 1);
}

static void test_never_used(void **state)
{
    (void)state;
    metal_idle_close(open_policy(KEEP_MS));
    assert_int_equal(holds, 0);
    assert_int_equal(releases, 0);
    metal_idle_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_released_once_after_the_last_use),
        cmocka_unit_test(test_claimed_again_by_the_next_use),
        cmocka_unit_test(test_renewed_while_in_use_and_released_at_the_end),
        cmocka_unit_test(test_never_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
