/* The arguments of the Metal kernels, one declaration for C and for Metal. All fields have 4 bytes,
 * so that both lay them out alike. */
#ifndef BACKEND_METAL_DIMS_H
#define BACKEND_METAL_DIMS_H

#ifndef __METAL_VERSION__
#include <stdint.h>
#endif

/* A weight as struct weight of op.h; stride counts rows from one matrix to the next. */
struct matrix_dims {
    uint32_t kind; /* enum weight_kind */
    uint32_t rows, cols, bits, group, stride;
    uint32_t wide; /* rows start on 16 bytes: codes may be read 16 bytes at a time */
};

/* struct segment of op.h */
struct segment_dims {
    uint32_t slot, row, rows, pos;
};

struct embed_dims {
    uint32_t rows;
    struct matrix_dims table;
};

struct norm_dims {
    uint32_t cols;
    uint32_t has_select, has_gain;
    float eps;
};

struct linear_dims {
    uint32_t rows, cols;
    uint32_t has_select, has_gain, add;
    float eps;
    uint32_t first_tile[5]; /* of each matrix, and the end */
    struct matrix_dims matrix[4];
};

struct mixer_dims {
    uint32_t key_heads, value_heads, segments;
    uint32_t chunk_min_rows; /* segments of at least so many rows go in chunks */
    uint32_t taken;          /* value heads of a threadgroup of delta_f32_step */
    float eps;
};

struct append_dims {
    uint32_t heads, kv_heads, segments, pages_max;
    float eps;
    float frequency[32]; /* of each rotated pair */
};

struct attend_dims {
    uint32_t heads, kv_heads, segments, pages_max;
    uint32_t splits, split_positions;
    uint32_t tile_min_rows; /* segments of at least so many rows go in tiles, shorter ones by row */
    uint32_t tiled;         /* which of the two this command does */
    uint32_t tile_rows;     /* query rows of a tile; 1 by row */
};

struct route_dims {
    uint32_t rows, experts, topk, renormalise;
};

struct expert_dims {
    uint32_t rows, hidden, topk, experts, width, shared_width;
    uint32_t act_width;  /* of a row of activations: the larger of the two widths */
    uint32_t block_rows; /* pairs of a block of the sorted order */
    struct matrix_dims gate, up, down, shared_gate, shared_up, shared_down;
};

struct sample_dims {
    uint32_t vocab, count, parts;
};

#endif
