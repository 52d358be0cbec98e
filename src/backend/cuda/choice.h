/* Which kernels do an op of a shape on this GPU: pure functions, so that each can be tested.
 *
 * They choose by counts and by what the GPU has, never by values, so that a step that is recorded
 * once stays valid. Where a kernel's usual form needs more shared memory than a block gets, a
 * smaller form does the same sums; the ring with tiles of 32 rows fits everywhere.
 *
 * `limit`: bytes of shared memory that a block can ask for, choice_shared_limit. */
#ifndef BACKEND_CUDA_CHOICE_H
#define BACKEND_CUDA_CHOICE_H

#include <stdbool.h>
#include <stdint.h>

/* A block gets 227 KB on compute capability 9.0 and 10.x, 163 KB on 8.0 and 8.7, 99 KB on 8.6, 8.9
 * and 12.x (CUDA programming guide); some is left for what kernels declare. */
enum { CHOICE_DECLARED_BYTES = 7 << 10, CHOICE_LEAST_BYTES = 99 << 10 };

static inline uint32_t choice_shared_limit(uint32_t bytes_of_a_block)
{
    return bytes_of_a_block - CHOICE_DECLARED_BYTES;
}

static inline uint32_t choice_ceil(uint64_t n, uint64_t by)
{
    return (uint32_t)((n + by - 1) / by);
}

/* Rows up to which kernels of few rows do what batch.cu does not take; linear in several launches.
 */
enum { CHOICE_FEW_ROWS = 8 };

/* ---- projections of few rows: linear_q4_step ---------------------------------------------- */

enum {
    CHOICE_STEP_ROWS = 4, /* of a launch, at most */
    CHOICE_STEP_WARPS = 32,
    CHOICE_STEP_ROUND = 4,              /* tiles of a warp between two sums over the warps */
    CHOICE_STEP_SLOTS = 5,              /* tiles that a warp fetches ahead, at most */
    CHOICE_STEP_FETCH_BYTES = 90 << 10, /* that a block has on their way, at most */
};

struct choice_step {
    uint32_t rows;  /* of a launch; 0: none fits */
    uint32_t share; /* warps that share the columns of a tile */
    uint32_t slots, shared_bytes;
};

/* With so many warps a tile: as many rows as fit, then as much ahead. */
static inline struct choice_step choice_step_share(uint32_t share, uint32_t groups, uint32_t tiles,
                                                   uint32_t rows, uint32_t blocks, uint32_t limit)
{
    uint32_t fetch = CHOICE_STEP_WARPS * choice_ceil(groups, share) * 576;
    uint32_t rounds = choice_ceil(tiles, (uint64_t)blocks * (CHOICE_STEP_WARPS / share));
    uint32_t most = CHOICE_STEP_FETCH_BYTES / fetch;
    most = most > CHOICE_STEP_SLOTS ? CHOICE_STEP_SLOTS : most;
    most = most > rounds ? rounds : most < 1 ? 1 : most;
    struct choice_step step = {0, share, 0, 0};
    for (rows = rows < CHOICE_STEP_ROWS ? rows : CHOICE_STEP_ROWS; rows && !step.rows; rows--) {
        uint64_t x = (uint64_t)(groups * 128 + CHOICE_STEP_ROUND * CHOICE_STEP_WARPS * 64) * rows +
                     (groups * rows + 1) / 2 * 16;
        uint32_t slots = most;
        while (slots && x + (uint64_t)slots * fetch > limit)
            slots--;
        step.rows = slots ? rows : 0;
        step.slots = slots;
        step.shared_bytes = slots ? (uint32_t)x + slots * fetch : 0;
    }
    return step;
}

/* groups: cols / 64; tiles: of 16 outputs, of all matrices. */
static inline struct choice_step choice_step(uint32_t groups, uint32_t tiles, uint32_t rows,
                                             uint32_t sms, uint32_t limit)
{
    uint32_t blocks = tiles < sms ? tiles : sms;
    uint32_t share = tiles > blocks ? CHOICE_STEP_WARPS / 2 : CHOICE_STEP_WARPS;
    struct choice_step step = choice_step_share(share, groups, tiles, rows, blocks, limit);
    return step.rows ? step
                     : choice_step_share(CHOICE_STEP_WARPS, groups, tiles, rows, blocks, limit);
}

/* ---- projections of a batch: batch_linear -------------------------------------------------- */

enum { CHOICE_SET = 4 /* rows of a product */, CHOICE_BATCH_WARPS = 16 };

static inline uint32_t choice_batch_bytes(uint32_t groups, uint32_t sets)
{
    return groups * sets * CHOICE_SET * 136 + 2 * CHOICE_BATCH_WARPS * sets * CHOICE_SET * 64;
}

/* How many sets of rows a block has at once: 2, 4 or 8; 0: not for this shape. */
static inline uint32_t choice_batch_sets(uint32_t rows, uint32_t groups, uint32_t limit)
{
    uint32_t sets = rows <= 2 * CHOICE_SET ? 2 : rows <= 4 * CHOICE_SET ? 4 : 8;
    while (sets > 2 && choice_batch_bytes(groups, sets) > limit)
        sets /= 2;
    return choice_batch_bytes(groups, sets) <= limit ? sets : 0;
}

/* ---- products of many rows: prefill.cu ----------------------------------------------------- */

/* A ring of CHOICE_RING_STAGES: codes and pairs of 4 tiles a warpgroup, n rows of x, on a boundary
 * of 1024 bytes. */
enum { CHOICE_RING_STAGES = 6 };
#define CHOICE_RING_X(warpgroups) (((warpgroups)*4 * (512 + 64) + 1023) / 1024 * 1024)
#define CHOICE_RING_BYTES(n, warpgroups)                                                           \
    ((CHOICE_RING_X(warpgroups) + (n)*128) * CHOICE_RING_STAGES + 1024)

struct choice_tile {
    uint32_t rows, warpgroups; /* of a block */
};

static inline struct choice_tile choice_dense(uint32_t rows, uint32_t limit)
{
    struct choice_tile tile = {rows > 32 ? 64u : 32u, 1};
    if (rows > 64 && CHOICE_RING_BYTES(128, 2) <= limit)
        tile.rows = 128, tile.warpgroups = 2;
    if (rows > 1024 && CHOICE_RING_BYTES(128, 4) <= limit)
        tile.rows = 128, tile.warpgroups = 4;
    return tile;
}

static inline struct choice_tile choice_fit_experts(uint32_t rows, uint32_t limit)
{
    if (rows == 128 && CHOICE_RING_BYTES(128, 4) > limit)
        rows = 64;
    if (rows == 64 && CHOICE_RING_BYTES(64, 4) > limit)
        rows = 32;
    struct choice_tile tile = {rows, rows == 32 ? 2u : 4u};
    return tile;
}

/* Near what an expert gets, since rows that are missing cost as much as others. */
static inline struct choice_tile choice_experts(uint64_t pairs, uint32_t experts, uint32_t limit)
{
    uint64_t mean = pairs / experts;
    return choice_fit_experts(mean <= 24 ? 32 : mean <= 160 ? 64 : 128, limit);
}

static inline struct choice_tile choice_shared_expert(uint32_t rows, uint32_t limit)
{
    return choice_fit_experts(rows <= 32 ? 32 : rows <= 1024 ? 64 : 128, limit);
}

/* ---- the router: moe.cu -------------------------------------------------------------------- */

enum {
    CHOICE_CLUSTER_ROWS = 64,
    CHOICE_CLUSTER_EXPERTS = 256, /* a warp each in 16 blocks */
    CHOICE_CLUSTER_COLS = 2048,   /* that a warp's first loads hold */
    CHOICE_ROUTE_OUTS = 288,      /* of a tile, the shared expert's included */
};

enum choice_route {
    CHOICE_ROUTE_CLUSTER, /* a cluster a row */
    CHOICE_ROUTE_STEP,    /* a row's last block chooses */
    CHOICE_ROUTE_TILE,    /* 32 rows a block, then a warp a row chooses */
    CHOICE_ROUTE_ANY,     /* any weights */
};

/* bits8: both routers have 8 bits in groups of 64; clusters: this GPU has room for one. */
static inline enum choice_route choice_route(uint32_t rows, uint32_t hidden, uint32_t experts,
                                             uint32_t topk, bool bits8, bool clusters)
{
    if (!bits8)
        return CHOICE_ROUTE_ANY;
    if (clusters && rows <= CHOICE_CLUSTER_ROWS && hidden <= CHOICE_CLUSTER_COLS &&
        experts <= CHOICE_CLUSTER_EXPERTS && topk <= 32)
        return CHOICE_ROUTE_CLUSTER;
    if (rows <= CHOICE_FEW_ROWS)
        return CHOICE_ROUTE_STEP;
    return experts < CHOICE_ROUTE_OUTS ? CHOICE_ROUTE_TILE : CHOICE_ROUTE_ANY;
}

/* ---- experts of few rows: moe.cu ----------------------------------------------------------- */

enum { CHOICE_UP_WARPS = 8, CHOICE_DOWN_WARPS = 24 };
/* uint4 of shared memory a group of 64 columns: x, its sums, codes and pairs of two matrices */
enum { CHOICE_UP_GROUP = 8 + 1 + 2 * 36 };

static inline uint64_t choice_up_bytes(uint32_t hidden)
{
    return (uint64_t)CHOICE_UP_WARPS * choice_ceil(hidden / 64, CHOICE_UP_WARPS) * CHOICE_UP_GROUP *
           16;
}

/* Two warps a choice, the shared expert included. */
static inline uint32_t choice_down_warps(uint32_t topk)
{
    return topk + 1 < CHOICE_DOWN_WARPS / 2 ? 2 * (topk + 1) : CHOICE_DOWN_WARPS;
}

static inline uint64_t choice_down_bytes(uint32_t topk, uint32_t widest)
{
    uint32_t most = (widest / 64 + 1) / 2;
    return (uint64_t)choice_down_warps(topk) * (most * 128 + (most + 1) / 2 * 16);
}

static inline bool choice_experts_step_fits(uint32_t hidden, uint32_t topk, uint32_t widest,
                                            uint32_t limit)
{
    return choice_up_bytes(hidden) <= limit && choice_down_bytes(topk, widest) <= limit;
}

#endif
