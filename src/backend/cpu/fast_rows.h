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
        for (uint32_t k = 0; k < w->cols; k += VF)
            vf_store(out + k, vf_load_bf16((const uint16_t *)data + k));
    } else if (w->kind == WEIGHT_AFFINE && w->bits == 8) {
        size_t at = index * (w->cols / w->group);
        const uint16_t *scales = (const uint16_t *)cpu_at(w->scales) + at;
        const uint16_t *biases = (const uint16_t *)cpu_at(w->biases) + at;
        for (uint32_t k = 0; k < w->cols; k += VF) {
            vf scale = vf_set(bf16_to_f32(scales[k / w->group]));
            vf bias = vf_set(bf16_to_f32(biases[k / w->group]));
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

/* f32: four decoded weight rows meet two rows of activations at a time. */
SIMD_INLINE void fast_rows_dot(const float *w, uint32_t cols, const float *a, const float *b,
                               float sum[8])
{
    vf acc[8];
    for (int i = 0; i < 8; i++)
        acc[i] = vf_zero();
    uint32_t k = 0;
    for (; cols - k >= VF; k += VF) {
        vf x = vf_load(a + k), y = vf_load(b + k);
        for (int i = 0; i < 4; i++) {
            vf v = vf_load(w + (size_t)i * cols + k);
            acc[i] = vf_fma(v, x, acc[i]);
            acc[4 + i] = vf_fma(v, y, acc[4 + i]);
        }
    }
    for (int i = 0; i < 8; i++)
        sum[i] = vf_sum(acc[i]);
    for (; k < cols; k++)
        for (int i = 0; i < 4; i++) {
            sum[i] += w[(size_t)i * cols + k] * a[k];
            sum[4 + i] += w[(size_t)i * cols + k] * b[k];
        }
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
            uint32_t u = t + 1 < x->rows ? t + 1 : t;
            float sum[8];
            fast_rows_dot(decoded, x->cols, x->row[t], x->row[u], sum);
            for (uint32_t i = 0; i < n; i++) {
                fast_rows_put(out + t * ld + r + i, sum[i], add);
                if (u != t)
                    fast_rows_put(out + u * ld + r + i, sum[4 + i], add);
            }
        }
    }
}

SIMD_INLINE void fast_rows_few(struct fast_codes w, uint32_t count, const struct fast_tile *x,
                               int n, bool add, float *out, size_t ld)
{
    for (uint32_t r = 0; r < count; r++) {
        vf acc[FAST_FEW_ROWS];
        for (int t = 0; t < n; t++)
            acc[t] = vf_zero();
        dot4_row(fast_codes_next(w, r, x->blocks), x, 0, n, acc);
        for (int t = 0; t < n; t++)
            fast_rows_put(out + (size_t)t * ld + r, vf_sum(acc[t]), add);
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
    switch (x->rows) {
    case 1:
        fast_rows_few(codes, count, x, 1, add, out, ld);
        return;
    case 2:
        fast_rows_few(codes, count, x, 2, add, out, ld);
        return;
    case 3:
        fast_rows_few(codes, count, x, 3, add, out, ld);
        return;
    case 4:
        fast_rows_few(codes, count, x, 4, add, out, ld);
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
