/* Products of some rows of a weight with a tile of activations, whatever the weight's kind. */
#ifndef BACKEND_CPU_FAST_ROWS_H
#define BACKEND_CPU_FAST_ROWS_H

#include "backend/cpu/fast_tile.h"
#include "base/pool.h"

/* Bytes of a worker's scratch for fast_rows_multiply: decoded rows, or factors and a panel. */
static inline size_t fast_rows_bytes(uint32_t cols)
{
    size_t stride = (cols / FAST_BLOCK + 7) / 8 * 8;
    size_t decoded = 4 * (size_t)cols * sizeof(float);
    size_t panel = (2 * stride + FAST_TILE_ROWS) * DOT4_PANEL * sizeof(float);
    return fast_align(decoded > panel ? decoded : panel);
}

/* Row of w as f32 [cols]; 8-bit and bf16 by vectors, the rare widths as the reference does. */
static inline void fast_rows_decode(const struct weight *w, uint32_t item, uint32_t row, float *out)
{
    size_t index = (size_t)item * w->expert_stride + row;
    const uint8_t *data = (const uint8_t *)cpu_at(w->data) + index * cpu_weight_row_bytes(w);
    if (w->kind == WEIGHT_BF16 && w->cols % VF == 0) {
        for (uint32_t k = 0; k < w->cols; k += VF) {
            __builtin_prefetch(data + 2 * (size_t)k + FAST_AHEAD);
            vf_store(out + k, vf_load_bf16((const uint16_t *)data + k));
        }
    } else if (w->kind == WEIGHT_AFFINE && w->bits == 8) {
        size_t at = index * (w->cols / w->group);
        const uint16_t *scales = (const uint16_t *)cpu_at(w->scales) + at;
        const uint16_t *biases = (const uint16_t *)cpu_at(w->biases) + at;
        for (uint32_t k = 0; k < w->cols; k += VF) {
            vf scale = vf_set(bf16_to_f32(scales[k / w->group]));
            vf bias = vf_set(bf16_to_f32(biases[k / w->group]));
            __builtin_prefetch(data + k + FAST_AHEAD);
            vf_store(out + k, vf_fma(vf_load_u8(data + k), scale, bias));
        }
    } else {
        cpu_weight_read_row(w, item, row, out);
    }
}

/* to = sum, or to += sum */
SIMD_INLINE void fast_rows_put(float *to, float sum, bool add)
{
    *to = add ? *to + sum : sum;
}

/* f32: four decoded weight rows meet n rows of activations (a constant, 1 or 2) at a time. */
SIMD_INLINE void fast_rows_dot(const float *w, uint32_t cols, const float *const *x, int n,
                               float sum[8])
{
    vf acc[8];
    for (int i = 0; i < 4 * n; i++)
        acc[i] = vf_zero();
    uint32_t k = 0;
    for (; cols - k >= VF; k += VF)
        for (int i = 0; i < 4; i++) {
            vf v = vf_load(w + (size_t)i * cols + k);
            for (int t = 0; t < n; t++)
                acc[4 * t + i] = vf_fma(v, vf_load(x[t] + k), acc[4 * t + i]);
        }
    for (int i = 0; i < 4 * n; i++)
        sum[i] = vf_sum(acc[i]);
    for (; k < cols; k++)
        for (int i = 0; i < 4 * n; i++)
            sum[i] += w[(size_t)(i % 4) * cols + k] * x[i / 4][k];
}

static inline void fast_rows_f32(const struct weight *w, uint32_t item, uint32_t o, uint32_t count,
                                 const struct fast_tile *x, bool add, float *out, size_t ld,
                                 float *decoded)
{
    for (uint32_t r = 0; r < count; r += 4) {
        uint32_t n = count - r < 4 ? count - r : 4;
        for (uint32_t i = 0; i < 4; i++)
            if (i < n)
                fast_rows_decode(w, item, o + r + i, decoded + (size_t)i * x->cols);
            else
                memset(decoded + (size_t)i * x->cols, 0, (size_t)x->cols * sizeof *decoded);
        for (uint32_t t = 0; t < x->rows; t += 2) {
            uint32_t pair = t + 1 < x->rows ? 2 : 1;
            float sum[8];
            if (pair == 2)
                fast_rows_dot(decoded, x->cols, x->row + t, 2, sum);
            else
                fast_rows_dot(decoded, x->cols, x->row + t, 1, sum);
            for (uint32_t u = 0; u < pair; u++)
                for (uint32_t i = 0; i < n; i++)
                    fast_rows_put(out + (t + u) * ld + r + i, sum[4 * u + i], add);
        }
    }
}

/* Rows first..first+n-1 of the tile, n a constant up to FAST_FEW_ROWS. What a row gets does not
 * depend on n. */
SIMD_INLINE void fast_rows_few(struct fast_codes w, uint32_t count, const struct fast_tile *x,
                               uint32_t first, int n, bool add, float *out, size_t ld)
{
    for (uint32_t r = 0; r < count; r++) {
        vf acc[FAST_FEW_ROWS];
        for (int t = 0; t < n; t++)
            acc[t] = vf_zero();
        dot4_row(fast_codes_next(w, r, x->blocks), x, first, n, acc);
        for (int t = 0; t < n; t++)
            fast_rows_put(out + (first + (size_t)t) * ld + r, vf_sum(acc[t]), add);
    }
}

static inline void fast_rows_by_rows(struct fast_codes w, uint32_t count, const struct fast_tile *x,
                                     bool add, float *out, size_t ld)
{
    for (uint32_t first = 0; first < x->rows; first += FAST_FEW_ROWS)
        switch (x->rows - first) {
        case 1:
            fast_rows_few(w, count, x, first, 1, add, out, ld);
            break;
        case 2:
            fast_rows_few(w, count, x, first, 2, add, out, ld);
            break;
        case 3:
            fast_rows_few(w, count, x, first, 3, add, out, ld);
            break;
        default:
            fast_rows_few(w, count, x, first, 4, add, out, ld);
            break;
        }
}

/* out[t * ld + i] = (or +=) row o + i of matrix `item` times row t of the tile, i < count. */
static inline void fast_rows_multiply(const struct weight *w, uint32_t item, uint32_t o,
                                      uint32_t count, const struct fast_tile *x, bool add,
                                      float *out, size_t ld, void *scratch)
{
    if (!fast_is_dot4(w)) {
        fast_rows_f32(w, item, o, count, x, add, out, ld, scratch);
        return;
    }
    struct fast_codes codes = fast_codes_at(w, item, o);
    if (fast_tile_by_rows(x)) {
        fast_rows_by_rows(codes, count, x, add, out, ld);
        return;
    }
    float *factors = scratch, *panel = factors + 2 * (size_t)x->stride * DOT4_PANEL;
    for (uint32_t r = 0; r < count; r += DOT4_PANEL) {
        uint32_t n = count - r < DOT4_PANEL ? count - r : DOT4_PANEL;
        dot4_panel(fast_codes_next(codes, r, x->blocks), n, x, factors, panel);
        for (uint32_t t = 0; t < x->rows; t++)
            for (uint32_t i = 0; i < n; i++)
                fast_rows_put(out + t * ld + r + i, panel[t * DOT4_PANEL + i], add);
    }
}

#endif
