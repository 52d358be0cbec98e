/* Which CUDA kernels do an op of a shape: the limits between them, and that none asks a GPU for
 * more shared memory than a block gets there. Needs no GPU. */
#include "backend/cuda/choice.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { SMS = 132, COLS_MAX = 16384 };

/* Compute capability 8.6, 8.9, 12.0; 8.0; 9.0, 10.0. */
static const uint32_t block_bytes[] = {99 << 10, 163 << 10, 227 << 10};
enum { GPUS = sizeof block_bytes / sizeof block_bytes[0] };

static uint32_t limit_of(int gpu)
{
    return choice_shared_limit(block_bytes[gpu]);
}

/* The 35B model's projections on an H200, as they were measured. */
static void test_steps_on_a_large_gpu_are_whole(void **state)
{
    (void)state;
    const struct {
        uint32_t cols, outs;
        struct choice_step step;
    } cases[] = {
        {2048, 8192 + 4096 + 32 + 32, {4, 16, 2, 4 * (4096 + 8192) + 1024 + 2 * 36864}},
        {2048, 8192 + 512 + 512, {4, 16, 2, 4 * (4096 + 8192) + 1024 + 2 * 36864}},
        {4096, 2048, {4, 32, 1, 4 * (8192 + 8192) + 2048 + 36864}},
        {2048, 248320, {4, 16, 2, 4 * (4096 + 8192) + 1024 + 2 * 36864}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t tiles = cases[i].outs / 16;
        struct choice_step got = choice_step(cases[i].cols / 64, tiles, 9, SMS, limit_of(GPUS - 1));
        assert_int_equal(got.rows, cases[i].step.rows);
        assert_int_equal(got.share, cases[i].step.share);
        assert_int_equal(got.slots, cases[i].step.slots);
        assert_int_equal(got.shared_bytes, cases[i].step.shared_bytes);
    }
}

static void test_steps_fit_every_gpu(void **state)
{
    (void)state;
    static const uint32_t one[] = {96, 192, 256}, four[] = {32, 64, 112}; /* groups with room */
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (uint32_t groups = 1; groups <= COLS_MAX / 64; groups++)
            for (uint32_t tiles = 1; tiles < 20000; tiles = tiles * 3 + 1)
                for (uint32_t rows = 1; rows <= 8; rows++) {
                    struct choice_step s = choice_step(groups, tiles, rows, SMS, limit_of(gpu));
                    assert_true(s.shared_bytes <= limit_of(gpu));
                    assert_true(s.rows <= rows && s.rows <= CHOICE_STEP_ROWS);
                    assert_true(s.slots <= CHOICE_STEP_SLOTS && !s.slots == !s.rows);
                    assert_true(s.rows || groups > one[gpu]);
                    assert_true(s.rows == (rows < 4 ? rows : 4) || groups > four[gpu]);
                }
}

static void test_batches_fit_every_gpu(void **state)
{
    (void)state;
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (uint32_t groups = 1; groups <= COLS_MAX / 64; groups++)
            for (uint32_t rows = 5; rows <= 32; rows++) {
                uint32_t sets = choice_batch_sets(rows, groups, limit_of(gpu));
                assert_true(sets == 0 || choice_batch_bytes(groups, sets) <= limit_of(gpu));
                assert_true(sets || groups > 64);
            }
    uint32_t large = limit_of(GPUS - 1), small = limit_of(0);
    assert_int_equal(choice_batch_sets(8, 32, large), 2);
    assert_int_equal(choice_batch_sets(9, 32, large), 4);
    assert_int_equal(choice_batch_sets(17, 32, large), 8);
    assert_int_equal(choice_batch_sets(17, 64, large), 4);
    assert_int_equal(choice_batch_sets(32, 32, small), 2);
    assert_int_equal(choice_batch_sets(32, 64, small), 2);
}

static void check_tile(struct choice_tile tile, uint32_t limit)
{
    assert_true(CHOICE_RING_BYTES(tile.rows, tile.warpgroups) <= limit);
}

static void test_rings_fit_every_gpu(void **state)
{
    (void)state;
    for (int gpu = 0; gpu < GPUS; gpu++)
        for (uint32_t rows = 1; rows <= 16384; rows++) {
            check_tile(choice_dense(rows, limit_of(gpu)), limit_of(gpu));
            check_tile(choice_shared_expert(rows, limit_of(gpu)), limit_of(gpu));
            check_tile(choice_experts(rows * 8ull, 256, limit_of(gpu)), limit_of(gpu));
            check_tile(choice_experts(rows * 8ull, 16, limit_of(gpu)), limit_of(gpu));
        }
    const uint32_t at[] = {32, 33, 64, 65, 1024, 1025}, want[] = {32, 64, 64, 128, 128, 128};
    for (size_t i = 0; i < 6; i++) {
        struct choice_tile tile = choice_dense(at[i], limit_of(GPUS - 1));
        assert_int_equal(tile.rows, want[i]);
        assert_int_equal(tile.warpgroups, at[i] <= 64 ? 1 : at[i] <= 1024 ? 2 : 4);
    }
    assert_int_equal(choice_experts(24 * 256 + 255, 256, limit_of(GPUS - 1)).rows, 32);
    assert_int_equal(choice_experts(25 * 256, 256, limit_of(GPUS - 1)).rows, 64);
    assert_int_equal(choice_experts(161 * 256, 256, limit_of(GPUS - 1)).rows, 128);
}

/* The router of the 35B model, and each limit with one more. */
static void test_routes(void **state)
{
    (void)state;
    static const struct {
        uint32_t rows, hidden, experts, topk;
        bool bits8, clusters;
        enum choice_route want;
    } cases[] = {
        {1, 2048, 256, 8, true, true, CHOICE_ROUTE_CLUSTER},
        {64, 2048, 256, 32, true, true, CHOICE_ROUTE_CLUSTER},
        {65, 2048, 256, 8, true, true, CHOICE_ROUTE_TILE},
        {8, 2112, 256, 8, true, true, CHOICE_ROUTE_STEP},
        {8, 2048, 257, 8, true, true, CHOICE_ROUTE_STEP},
        {8, 2048, 256, 33, true, true, CHOICE_ROUTE_STEP},
        {8, 2048, 256, 8, true, false, CHOICE_ROUTE_STEP},
        {9, 2048, 256, 8, true, false, CHOICE_ROUTE_TILE},
        {9, 2048, 287, 8, true, true, CHOICE_ROUTE_TILE},
        {9, 2048, 288, 8, true, true, CHOICE_ROUTE_ANY},
        {1, 2048, 256, 8, false, true, CHOICE_ROUTE_ANY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(choice_route(cases[i].rows, cases[i].hidden, cases[i].experts,
                                      cases[i].topk, cases[i].bits8, cases[i].clusters),
                         cases[i].want);
}

/* Few rows: of the 35B model everywhere; what does not fit goes the way of many. */
static void test_experts_of_few_rows(void **state)
{
    (void)state;
    for (int gpu = 0; gpu < GPUS; gpu++) {
        assert_true(choice_experts_step_fits(2048, 8, 512, limit_of(gpu)));
        assert_true(choice_experts_step_fits(4096, 10, 1024, limit_of(gpu)));
        assert_int_equal(choice_experts_step_fits(8192, 8, 512, limit_of(gpu)), gpu == 2);
    }
    assert_int_equal(choice_down_warps(8), 18);
    assert_int_equal(choice_down_warps(32), CHOICE_DOWN_WARPS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_on_a_large_gpu_are_whole),
        cmocka_unit_test(test_steps_fit_every_gpu),
        cmocka_unit_test(test_batches_fit_every_gpu),
        cmocka_unit_test(test_rings_fit_every_gpu),
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_experts_of_few_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
