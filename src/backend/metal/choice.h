/* Which kernels do an op of a shape: pure functions, so that each can be tested.
 *
 * They choose by counts alone, never by values, so that a step that is recorded once stays valid,
 * and two runs of the same batch take the same kernels. */
#ifndef BACKEND_METAL_CHOICE_H
#define BACKEND_METAL_CHOICE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    CHOICE_CHUNK_MIN_ROWS = 8,    /* of a segment whose delta rule runs in chunks; at least 3 */
    CHOICE_FLASH_ROWS = 32,       /* packed rows (query row, head) of a tile of attention */
    CHOICE_SPLIT_POSITIONS = 256, /* the least of a split of attention; splits are multiples */
    CHOICE_SPLITS_MAX = 128,
    CHOICE_ENOUGH_GROUPS = 96, /* threadgroups that keep the largest GPU busy */
};

static inline uint32_t choice_ceil(uint64_t n, uint64_t by)
{
    return (uint32_t)((n + by - 1) / by);
}

enum choice_rows {
    CHOICE_ROW,       /* one row: weights are read once, 16 bytes a lane */
    CHOICE_ROWS_4,    /* up to 4: each weight that is read meets all rows */
    CHOICE_SKINNY_8,  /* blocks of 8 rows on matrix units, K split over the simdgroups */
    CHOICE_SKINNY_16, /* of 16 */
    CHOICE_TILE_32,
    CHOICE_TILE_64, /* where 64 rows come together: fewer loads a product */
};

static inline enum choice_rows choice_linear(uint32_t rows)
{
    return rows <= 1    ? CHOICE_ROW
           : rows <= 4  ? CHOICE_ROWS_4
           : rows <= 8  ? CHOICE_SKINNY_8
           : rows <= 16 ? CHOICE_SKINNY_16
           : rows <= 32 ? CHOICE_TILE_32
                        : CHOICE_TILE_64;
}

/* Experts: up to 4 rows share so few of them that sorting costs more than it saves (CHOICE_ROW). A
 * block costs the same full or not, so blocks are of 8 pairs until an expert has 12 on average, and
 * of 64 from 48 on. On TensorOps, where products cost less, blocks of 32 begin at 4 and stay. */
static inline enum choice_rows choice_experts(uint32_t rows, uint32_t topk, uint32_t experts,
                                              bool tensor)
{
    if (rows <= 4)
        return CHOICE_ROW;
    uint64_t pairs = (uint64_t)rows * topk;
    if (pairs < (tensor ? 4ull : 12ull) * experts)
        return CHOICE_SKINNY_8;
    return tensor || pairs < 48ull * experts ? CHOICE_TILE_32 : CHOICE_TILE_64;
}

/* Whether the router's products and its choice are one command: for rows that one threadgroup
 * chooses for as fast as a command for each would, where threadgroups can tell which is last. */
static inline bool choice_routes_at_once(uint32_t rows, bool fences)
{
    return fences && rows <= 4;
}

/* Value heads that a threadgroup of the delta step takes, of `ratio` that read one key head: all of
 * them where `groups` threadgroups do, else one if threadgroups can tell which is last. */
static inline uint32_t choice_delta_heads(uint32_t ratio, uint64_t groups, bool fences)
{
    return fences && groups < CHOICE_ENOUGH_GROUPS ? 1 : ratio;
}

/* Rows from which on a segment's attention goes in tiles, for `group` query heads a KV head. A
 * product of a half empty tile costs what the loads of a row at a time do, so tiles begin where
 * they are half full; heads that do not fit a tile never get there. */
static inline uint32_t choice_tile_min_rows(uint32_t group)
{
    return group > CHOICE_FLASH_ROWS ? UINT32_MAX : choice_ceil(CHOICE_FLASH_ROWS / 2, group);
}

/* Positions a split by row: one split up to 256, then blocks of a fixed size until there are 128 of
 * them; only then blocks grow. */
static inline uint32_t choice_split_positions(uint32_t ctx)
{
    uint32_t blocks = choice_ceil(ctx, CHOICE_SPLIT_POSITIONS);
    return choice_ceil(blocks, CHOICE_SPLITS_MAX) * CHOICE_SPLIT_POSITIONS;
}

/* In tiles: as many splits as fill the GPU, none where `groups` threadgroups do without. */
static inline uint32_t choice_tile_split_positions(uint32_t ctx, uint64_t groups)
{
    uint32_t wanted = choice_ceil(CHOICE_ENOUGH_GROUPS, groups);
    uint32_t blocks = choice_ceil(ctx, CHOICE_SPLIT_POSITIONS);
    return choice_ceil(blocks, wanted) * CHOICE_SPLIT_POSITIONS;
}

#endif
