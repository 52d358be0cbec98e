/* The Gated DeltaNet mixer for the fast levels.
 *
 * A task is one key head of one segment with the value heads that read it: it owns its channels of
 * the convolution and its states, so nothing is shared. Rows go in chunks whose q, k, v fit the
 * cache; a head's state goes in column strips that fit the first-level cache, because columns are
 * independent: a strip is carried through all rows of a chunk.
 *
 * One pass over a strip a row does everything: it applies the row's update and, on the new values,
 * gathers S^T k and S^T q of the next row. With them o = e^g S^T q + (k . q) d needs no second
 * pass.
 * On a CPU this costs less than the chunked (matrix) form, which trades 4 multiply-adds a state
 * element and row for 3 at the price of triangular solves; and no exponent but g <= 0 occurs. */
#include "backend/cpu/fast.h"
#include "base/pool.h"

#include <math.h>

enum {
    DELTA_DIM = 128,
    DELTA_ROWS = 64,               /* of a chunk */
    DELTA_STRIP = SIMD_STRIP * VF, /* columns */
};

/* What a worker keeps of a chunk. */
struct delta_chunk {
    float q[DELTA_ROWS][DELTA_DIM], k[DELTA_ROWS][DELTA_DIM], v[DELTA_ROWS][DELTA_DIM];
    float o[DELTA_ROWS][DELTA_DIM];
    float decay[DELTA_ROWS], beta[DELTA_ROWS], qk[DELTA_ROWS];
};

struct delta_work {
    const struct delta_args *args;
    size_t channels;
    struct delta_chunk *chunk; /* [workers] */
};

/* Row t of the segment as the convolution sees it: t < 0 lies in the state, oldest first. */
static const float *delta_input(const struct delta_work *work, const struct segment *s, int64_t t)
{
    static const float zero[DELTA_DIM];
    if (t >= 0)
        return (const float *)cpu_at(work->args->qkv) + (s->row + (size_t)t) * work->channels;
    if (s->pos == 0)
        return zero;
    return (const float *)cpu_at(work->args->conv_state) +
           ((size_t)s->slot * 3 + (size_t)(t + 3)) * work->channels;
}

/* out[t] = silu(convolution) of channels ch..ch+127 for rows first..first+n-1. */
static void delta_conv(const struct delta_work *work, const struct segment *s, uint32_t first,
                       uint32_t n, size_t ch, float out[][DELTA_DIM])
{
    const float *conv = (const float *)cpu_at(work->args->conv) + ch * 4;
    float tap[4][DELTA_DIM];
    for (int i = 0; i < DELTA_DIM; i++)
        for (int j = 0; j < 4; j++)
            tap[j][i] = conv[i * 4 + j];
    for (uint32_t t = 0; t < n; t++) {
        const float *u[4];
        for (int j = 0; j < 4; j++) {
            int64_t at = (int64_t)first + t - 3 + j;
            u[j] = delta_input(work, s, at) + (at < 0 && s->pos == 0 ? 0 : ch);
        }
        for (int i = 0; i < DELTA_DIM; i += VF) {
            vf sum = vf_mul(vf_load(tap[0] + i), vf_load(u[0] + i));
            for (int j = 1; j < 4; j++)
                sum = vf_fma(vf_load(tap[j] + i), vf_load(u[j] + i), sum);
            vf_store(out[t] + i, vf_silu(sum));
        }
    }
}

/* The state becomes the last three rows of u, channels ch..ch+127. */
static void delta_conv_keep(const struct delta_work *work, const struct segment *s, size_t ch)
{
    float kept[3][DELTA_DIM];
    for (int j = 0; j < 3; j++) {
        int64_t at = (int64_t)s->rows - 3 + j;
        const float *u = delta_input(work, s, at) + (at < 0 && s->pos == 0 ? 0 : ch);
        memcpy(kept[j], u, sizeof kept[j]);
    }
    for (int j = 0; j < 3; j++)
        memcpy((float *)cpu_at(work->args->conv_state) +
                   ((size_t)s->slot * 3 + (size_t)j) * work->channels + ch,
               kept[j], sizeof kept[j]);
}

static void delta_l2norm(float x[][DELTA_DIM], uint32_t n, float scale)
{
    for (uint32_t t = 0; t < n; t++) {
        float factor = scale / sqrtf(simd_dot(x[t], x[t], DELTA_DIM) + 1e-6f);
        for (int i = 0; i < DELTA_DIM; i += VF)
            vf_store(x[t] + i, vf_mul(vf_load(x[t] + i), vf_set(factor)));
    }
}

/* Asks for the cache lines of row i of a state that is needed soon. */
SIMD_INLINE void delta_fetch(const float *state, int i)
{
    for (int line = 0; line < DELTA_DIM / 16; line++)
        __builtin_prefetch(state + (size_t)i * DELTA_DIM + line * 16, 1);
}

/* The rows of a chunk through one strip of a state. `soon`: a state to fetch meanwhile, or null. */
SIMD_INLINE void delta_scan(const struct delta_chunk *c, uint32_t n, int column, float *state,
                            float o[][DELTA_DIM], const float *soon)
{
    vf sk[SIMD_STRIP], sq[SIMD_STRIP], d[SIMD_STRIP];
    float *strip = state + column;
    for (int j = 0; j < SIMD_STRIP; j++)
        sk[j] = sq[j] = vf_zero();
    for (int i = 0; i < DELTA_DIM; i++) {
        vf k = vf_set(c->k[0][i]), q = vf_set(c->q[0][i]);
        if (soon)
            delta_fetch(soon, i);
        for (int j = 0; j < SIMD_STRIP; j++) {
            vf s = vf_load(strip + (size_t)i * DELTA_DIM + j * VF);
            sk[j] = vf_fma(k, s, sk[j]);
            sq[j] = vf_fma(q, s, sq[j]);
        }
    }
    for (uint32_t t = 0; t < n; t++) {
        uint32_t next = t + 1 < n ? t + 1 : t;
        vf decay = vf_set(c->decay[t]), beta = vf_set(c->beta[t]), qk = vf_set(c->qk[t]);
        for (int j = 0; j < SIMD_STRIP; j++) {
            vf v = vf_load(c->v[t] + column + j * VF);
            d[j] = vf_mul(beta, vf_sub(v, vf_mul(decay, sk[j])));
            vf_store(o[t] + column + j * VF, vf_fma(qk, d[j], vf_mul(decay, sq[j])));
            sk[j] = sq[j] = vf_zero();
        }
        for (int i = 0; i < DELTA_DIM; i++) {
            vf k = vf_set(c->k[t][i]), kn = vf_set(c->k[next][i]), qn = vf_set(c->q[next][i]);
            for (int j = 0; j < SIMD_STRIP; j++) {
                float *at = strip + (size_t)i * DELTA_DIM + j * VF;
                vf s = vf_fma(k, d[j], vf_mul(decay, vf_load(at)));
                vf_store(at, s);
                sk[j] = vf_fma(kn, s, sk[j]);
                sq[j] = vf_fma(qn, s, sq[j]);
            }
        }
    }
}

static void delta_gates(const struct delta_args *args, size_t row, uint32_t n, uint32_t head,
                        struct delta_chunk *c)
{
    uint32_t heads = args->dims.value_heads;
    float rate = -expf(((const float *)cpu_at(args->a_log))[head]);
    float shift = ((const float *)cpu_at(args->dt_bias))[head];
    for (uint32_t t = 0; t < n; t++) {
        float x = ((const float *)cpu_at(args->a))[(row + t) * heads + head] + shift;
        float b = ((const float *)cpu_at(args->b))[(row + t) * heads + head];
        c->decay[t] = expf(rate * (x > 20 ? x : log1pf(expf(x))));
        c->beta[t] = 1 / (1 + expf(-b));
    }
}

/* y = norm * o * rsqrt(mean(o^2) + eps) * silu(z) */
static void delta_gate_output(const struct delta_args *args, size_t row, uint32_t head,
                              const float *o)
{
    size_t at = (row * args->dims.value_heads + head) * DELTA_DIM;
    const float *z = (const float *)cpu_at(args->z) + at, *norm = cpu_at(args->norm);
    float *y = (float *)cpu_at(args->y) + at;
    float scale = 1 / sqrtf(simd_dot(o, o, DELTA_DIM) / DELTA_DIM + args->dims.eps);
    for (int i = 0; i < DELTA_DIM; i += VF) {
        vf n = vf_mul(vf_load(norm + i), vf_mul(vf_load(o + i), vf_set(scale)));
        vf_store(y + i, vf_mul(n, vf_silu(vf_load(z + i))));
    }
}

static void delta_task(void *arg, uint32_t task, int worker)
{
    struct delta_work *work = arg;
    const struct delta_args *args = work->args;
    uint32_t key_heads = args->dims.key_heads, group = args->dims.value_heads / key_heads;
    const struct segment *s = &args->batch->host_segments[task / key_heads];
    uint32_t head = task % key_heads, value0 = head * group;
    struct delta_chunk *c = &work->chunk[worker];
    float *state = (float *)cpu_at(args->state) +
                   ((size_t)s->slot * args->dims.value_heads + value0) * DELTA_DIM * DELTA_DIM;
    if (s->pos == 0)
        memset(state, 0, (size_t)group * DELTA_DIM * DELTA_DIM * sizeof *state);
    size_t q_at = (size_t)head * DELTA_DIM, k_at = (size_t)(key_heads + head) * DELTA_DIM;
    size_t v_at = (size_t)(2 * key_heads + value0) * DELTA_DIM;
    for (uint32_t first = 0; first < s->rows; first += DELTA_ROWS) {
        uint32_t n = s->rows - first < DELTA_ROWS ? s->rows - first : (uint32_t)DELTA_ROWS;
        delta_conv(work, s, first, n, q_at, c->q);
        delta_conv(work, s, first, n, k_at, c->k);
        delta_l2norm(c->q, n, 1 / sqrtf(DELTA_DIM));
        delta_l2norm(c->k, n, 1);
        for (uint32_t t = 0; t < n; t++)
            c->qk[t] = simd_dot(c->q[t], c->k[t], DELTA_DIM);
        for (uint32_t h = 0; h < group; h++) {
            float *own = state + (size_t)h * DELTA_DIM * DELTA_DIM;
            const float *soon = h + 1 < group ? own + DELTA_DIM * DELTA_DIM : NULL;
            delta_conv(work, s, first, n, v_at + (size_t)h * DELTA_DIM, c->v);
            delta_gates(args, s->row + first, n, value0 + h, c);
            for (int column = 0; column < DELTA_DIM; column += DELTA_STRIP)
                delta_scan(c, n, column, own, c->o, column == 0 ? soon : NULL);
            for (uint32_t t = 0; t < n; t++)
                delta_gate_output(args, (size_t)s->row + first + t, value0 + h, c->o[t]);
        }
    }
    delta_conv_keep(work, s, q_at);
    delta_conv_keep(work, s, k_at);
    for (uint32_t h = 0; h < group; h++)
        delta_conv_keep(work, s, v_at + (size_t)h * DELTA_DIM);
}

void LEVEL(delta)(struct device *device, const struct delta_args *args)
{
    struct delta_work work = {
        .args = args,
        .channels = (2 * (size_t)args->dims.key_heads + args->dims.value_heads) * DELTA_DIM,
        .chunk = cpu_scratch(device, 0, (size_t)device->threads, sizeof *work.chunk),
    };
    if (work.chunk)
        pool_run(device->pool, delta_task, &work, args->batch->segments * args->dims.key_heads);
}
