/* Which Metal kernels do an op of a shape: the limits between them, and what must hold of each. */
#include "backend/metal/choice.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void test_linear_by_rows(void **state)
{
    (void)state;
    assert_int_equal(choice_linear(1), CHOICE_ROW);
    assert_int_equal(choice_linear(2), CHOICE_ROWS_4);
    assert_int_equal(choice_linear(4), CHOICE_ROWS_4);
    assert_int_equal(choice_linear(5), CHOICE_SKINNY_8);
    assert_int_equal(choice_linear(8), CHOICE_SKINNY_8);
    assert_int_equal(choice_linear(9), CHOICE_SKINNY_16);
    assert_int_equal(choice_linear(16), CHOICE_SKINNY_16);
    assert_int_equal(choice_linear(17), CHOICE_TILE_32);
    assert_int_equal(choice_linear(32), CHOICE_TILE_32);
    assert_int_equal(choice_linear(33), CHOICE_TILE_64);
    assert_int_equal(choice_linear(UINT32_MAX), CHOICE_TILE_64);
}

/* For the 35B model's 256 experts of which 8 are chosen. */
static void test_experts_by_pairs_an_expert(void **state)
{
    (void)state;
    assert_int_equal(choice_experts(1, 8, 256, false), CHOICE_ROW);
    assert_int_equal(choice_experts(4, 8, 256, false), CHOICE_ROW);
    assert_int_equal(choice_experts(5, 8, 256, false), CHOICE_SKINNY_8);
    assert_int_equal(choice_experts(383, 8, 256, false), CHOICE_SKINNY_8);
    assert_int_equal(choice_experts(384, 8, 256, false), CHOICE_TILE_32);
    assert_int_equal(choice_experts(1535, 8, 256, false), CHOICE_TILE_32);
    assert_int_equal(choice_experts(1536, 8, 256, false), CHOICE_TILE_64);
    assert_int_equal(choice_experts(4096, 8, 256, false), CHOICE_TILE_64);
    assert_int_equal(choice_experts(127, 8, 256, true), CHOICE_SKINNY_8);
    assert_int_equal(choice_experts(128, 8, 256, true), CHOICE_TILE_32);
    assert_int_equal(choice_experts(4096, 8, 256, true), CHOICE_TILE_32);
    assert_int_equal(choice_experts(UINT32_MAX, 32, 1024, false),
                     CHOICE_TILE_64); /* 64 bits inside */
}

/* What needs threadgroups that know of each other is done where they do. */
static void test_fences_decide(void **state)
{
    (void)state;
    assert_true(choice_routes_at_once(1, true));
    assert_true(choice_routes_at_once(4, true));
    assert_false(choice_routes_at_once(5, true));
    assert_false(choice_routes_at_once(1, false));
    assert_int_equal(choice_delta_heads(2, 16, true), 1);
    assert_int_equal(choice_delta_heads(2, 95, true), 1);
    assert_int_equal(choice_delta_heads(2, 96, true), 2);
    assert_int_equal(choice_delta_heads(2, 16, false), 2);
}

/* Half of the packed rows are filled from the limit on, and never before. */
static void test_tiles_of_attention_begin_half_full(void **state)
{
    (void)state;
    for (uint32_t group = 1; group <= 32; group++) {
        uint32_t rows = choice_tile_min_rows(group);
        assert_true(rows * group >= 16);
        assert_true(rows == 1 || (rows - 1) * group < 16);
    }
    assert_int_equal(choice_tile_min_rows(8), 2);
    assert_int_equal(choice_tile_min_rows(33), UINT32_MAX);
}

/* Whole pages a split, at most 128 splits, every position in one. */
static void test_splits_cover_the_context(void **state)
{
    (void)state;
    const uint32_t ctx[] = {1, 255, 256, 257, 32768, 32769, 131072, 262144};
    for (size_t i = 0; i < sizeof ctx / sizeof ctx[0]; i++) {
        uint32_t by_row = choice_split_positions(ctx[i]);
        assert_int_equal(by_row % CHOICE_SPLIT_POSITIONS, 0);
        assert_true(choice_ceil(ctx[i], by_row) <= CHOICE_SPLITS_MAX);
        for (uint64_t groups = 1; groups < 300; groups += 7) {
            uint32_t tiled = choice_tile_split_positions(ctx[i], groups);
            uint32_t splits = choice_ceil(ctx[i], tiled);
            assert_int_equal(tiled % CHOICE_SPLIT_POSITIONS, 0);
            assert_true(splits <= CHOICE_SPLITS_MAX);
            assert_true(groups < CHOICE_ENOUGH_GROUPS || splits == 1);
            assert_true((splits - 1) * groups < CHOICE_ENOUGH_GROUPS);
        }
    }
    assert_int_equal(choice_split_positions(256), 256);
    assert_int_equal(choice_split_positions(32768), 256);
    assert_int_equal(choice_split_positions(32769), 512);
    assert_int_equal(choice_ceil(131072, choice_tile_split_positions(131072, 2)), 47);
}

/* The convolution's state is written by a kernel that does not read it: three rows at least. */
static void test_chunks_have_a_window(void **state)
{
    (void)state;
    assert_true(CHOICE_CHUNK_MIN_ROWS >= 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear_by_rows),
        cmocka_unit_test(test_experts_by_pairs_an_expert),
        cmocka_unit_test(test_fences_decide),
        cmocka_unit_test(test_tiles_of_attention_begin_half_full),
        cmocka_unit_test(test_splits_cover_the_context),
        cmocka_unit_test(test_chunks_have_a_window),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
