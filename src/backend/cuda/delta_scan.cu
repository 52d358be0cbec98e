/* Gated DeltaNet over many rows, CHUNK rows at a time on tensor cores.
 *
 * With G_i the sum of g up to row i of a chunk and S the state before it, the d of the recurrence
 * (d_i = beta_i (v_i - what k_i reads)) solve a triangular system:
 *   A_ij = beta_i e^(G_i - G_j) k_i.k_j  (j < i),   T = (I + A)^-1
 *   d = U - W S,   U = T beta v,   W = T beta e^G k
 *   o_i = e^(G_i) q_i S + sum_(j <= i) e^(G_i - G_j) (q_i.k_j) d_j
 *   S <- e^(G_end) S + sum_j e^(G_end - G_j) k_j d_j
 * No exponent is positive, |T_ij| <= beta_j and |W_i| <= 1 whatever the gates are (products of
 * I - beta k k^T), so nothing cancels more than in the sequential form.
 *
 *   scan_prepare: a chunk and key head a block: convolution, norms, gates, T in f32, U, W and
 *                 the weights of d in o. All chunks at once.
 *   scan_states:  64 value columns of a head a block, the state in registers: the only part that
 *                 goes from chunk to chunk, two products each. Leaves d and each chunk's S.
 *   scan_outputs: a chunk and value head a block: o, gated norm. All chunks at once.
 *
 * Factors are f16 with 11 bits, sums and the state f32. v and S are held VALUE_SCALE times larger,
 * so that small ones keep their bits. What one kernel leaves for the next lies in the order in
 * which a warp's lanes hold operands ("fragments", uint4 a lane), so it is copied and never
 * rearranged; the transposed d and S that scan_states multiplies with never leave its registers. */
#include "backend/cuda/delta.cuh"

enum {
    DIM = DELTA_DIM,
    CHUNK = 64,
    PREPARE_THREADS = 256,
    STATES_THREADS = 128,
    OUTPUTS_THREADS = 128,
    STATES_STAGES = 3,
    CONV_ROWS = CHUNK * 32 / PREPARE_THREADS
};
enum { PAD = 8, ROW = DIM + PAD, VALUE_SCALE = 16 };

/* Fragments, in uint4: [..][32 lanes]. */
enum {
    KEY_FRAGMENTS = CHUNK * DIM / 8, /* q: [row tile 4][step 8]; k: [key tile 16][step pair 2] */
    W_FRAGMENTS = CHUNK * DIM / 8,   /* -W: [row tile 8][step pair 4] */
    D_FRAGMENTS = CHUNK * DIM / 8,   /* d transposed: [column group 8][step 4] */
    U_FRAGMENTS = CHUNK * DIM / 4,   /* U transposed, f32: [column group 8][row tile 8] */
    P_FRAGMENTS = CHUNK * CHUNK / 8, /* [row tile 4][step 4] */
    STATE_FRAGMENTS = DIM * DIM / 8, /* S transposed: [column group 8][step 8] */
    DECAYS = 2 * CHUNK,              /* f32: e^(G_i), then e^(G_end - G_i) */
};

struct scan_args {
    struct delta_kernel_args a;
    uint4 *q, *k;     /* [chunks, key_heads, KEY_FRAGMENTS] */
    uint4 *w, *d, *p; /* [chunks, value_heads, *_FRAGMENTS] */
    float4 *u;        /* [chunks, value_heads, U_FRAGMENTS] */
    uint4 *states;    /* [chunks, value_heads, STATE_FRAGMENTS] */
    float *decays;    /* [chunks, value_heads, DECAYS] */
};

static __device__ __forceinline__ uint32_t segment_chunks(const struct segment &seg)
{
    return (seg.rows + CHUNK - 1) / CHUNK;
}

/* The segment of a chunk, chunks counted through all segments, and the segment's first. */
static __device__ __forceinline__ struct segment chunk_segment(const struct delta_kernel_args &a,
                                                               uint32_t chunk, uint32_t *first)
{
    uint32_t i = 0, base = 0;
    for (;; i++) {
        uint32_t n = segment_chunks(a.segments[i]);
        if (chunk < base + n || i + 1 == a.segment_count)
            break;
        base += n;
    }
    *first = base;
    return a.segments[i];
}

/* ---- before the recurrence ---------------------------------------------------------------- */

struct prepare_shared {
    __half k[CHUNK][ROW], q[CHUNK][ROW];
    __half v[2][CHUNK][ROW];   /* v rounded, and what that left; first of k and q what it left */
    float t[CHUNK][CHUNK + 4]; /* A below the diagonal, then T */
    double g[CHUNK];           /* G: long sums keep their small steps */
    float beta[CHUNK], beta_decay[CHUNK]; /* beta; beta e^G */
};
static_assert(sizeof(struct prepare_shared) <= CHOICE_LEAST_BYTES, "does not fit every GPU");

/* What rounding two numbers to `pair` left, rounded. */
static __device__ __forceinline__ uint32_t f16_rest(uint32_t pair, float low, float high)
{
    float2 v = f16_floats(pair);
    return f16_pair(low - v.x, high - v.y);
}

/* Two approximations with errors of 1e-6, where a division would cost more than the convolution. */
static __device__ __forceinline__ float silu_quick(float x)
{
    return __fdividef(x, 1 + __expf(-x));
}

/* silu(convolution) of the lane's four channels for CONV_ROWS rows; rows past the end give 0. */
static __device__ __forceinline__ void prepare_conv(const struct delta_kernel_args &a,
                                                    const struct segment &seg, uint32_t first,
                                                    uint32_t channel, float4 out[CONV_ROWS])
{
    uint32_t c = delta_channels(a);
    float4 tap[4], u[CONV_ROWS + 3];
#pragma unroll
    for (int i = 0; i < 4; i++)
        tap[i] = ((const float4 *)a.conv)[channel + i];
#pragma unroll
    for (int n = 0; n < CONV_ROWS + 3; n++) {
        int64_t from = (int64_t)first - 3 + n;
        u[n] = make_float4(0, 0, 0, 0);
        if (from >= 0 && from < seg.rows)
            u[n] = *(const float4 *)(a.qkv + (seg.row + from) * c + channel);
        else if (from < 0 && seg.pos)
            u[n] =
                *(const float4 *)(a.conv_state + ((uint64_t)seg.slot * 3 + 3 + from) * c + channel);
    }
#pragma unroll
    for (int n = 0; n < CONV_ROWS; n++) {
        float4 w = u[n], x = u[n + 1], y = u[n + 2], v = u[n + 3];
        out[n] = make_float4(0, 0, 0, 0);
        if (first + n < seg.rows)
            out[n] = make_float4(
                silu_quick(tap[0].x * w.x + tap[0].y * x.x + tap[0].z * y.x + tap[0].w * v.x),
                silu_quick(tap[1].x * w.y + tap[1].y * x.y + tap[1].z * y.y + tap[1].w * v.y),
                silu_quick(tap[2].x * w.z + tap[2].y * x.z + tap[2].z * y.z + tap[2].w * v.z),
                silu_quick(tap[3].x * w.w + tap[3].y * x.w + tap[3].z * y.w + tap[3].w * v.w));
    }
}

/* The warp's CONV_ROWS rows of a head's 128 channels, rounded, and what rounding left: q or k with
 * length 1, or v times VALUE_SCALE. */
static __device__ __forceinline__ void prepare_rows(const struct delta_kernel_args &a,
                                                    const struct segment &seg, uint32_t first,
                                                    uint32_t channel, bool norm, __half to[][ROW],
                                                    __half rest[][ROW])
{
    uint32_t row = threadIdx.x / 32 * CONV_ROWS, lane = threadIdx.x % 32;
    float4 x[CONV_ROWS];
    prepare_conv(a, seg, first + row, channel + lane * 4, x);
#pragma unroll
    for (int n = 0; n < CONV_ROWS; n++) {
        float4 v = x[n];
        float scale = VALUE_SCALE;
        if (norm)
            scale = rsqrtf(warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) + 1e-6f);
        v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
        uint2 pair = make_uint2(f16_pair(v.x, v.y), f16_pair(v.z, v.w));
        *(uint2 *)&to[row + n][lane * 4] = pair;
        *(uint2 *)&rest[row + n][lane * 4] =
            make_uint2(f16_rest(pair.x, v.x, v.y), f16_rest(pair.y, v.z, v.w));
    }
}

/* The operand of 16 rows and columns from `at` on. */
static __device__ __forceinline__ void load_operand(uint32_t r[4], const __half *at, uint32_t row)
{
    uint32_t lane = threadIdx.x % 32;
    load_matrices(r, at + lane % 16 * row + lane / 16 * 8);
}

/* Warps 0..3: k k^T, warps 4..7: q k^T, for 16 rows i each: out[j tile][4], as exact as f32: o is
 * normalised, so where q.k is small its error would be magnified. Stores q's and k's fragments. */
static __device__ __forceinline__ void prepare_products(const struct prepare_shared *sh,
                                                        float out[8][4], uint4 *q, uint4 *k)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp % 4;
    const __half(*rows)[ROW] = warp < 4 ? sh->k : sh->q;
    const __half(*rests)[ROW] = sh->v[warp / 4];
#pragma unroll
    for (int j = 0; j < 8; j++)
        out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0;
#pragma unroll 1
    for (int step = 0; step < DIM / 16; step += 2) {
        uint32_t x[2][4], rest[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_operand(x[i], &rows[tile * 16][(step + i) * 16], ROW);
            load_operand(rest[i], &rests[tile * 16][(step + i) * 16], ROW);
            if (warp >= 4)
                q[(tile * 8 + step + i) * 32 + lane] =
                    make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < 2 * tile + 2) {
                uint32_t y[4], y_rest[4], col = step * 16 + lane / 8 * 8;
                load_matrices(y, &sh->k[j * 8 + lane % 8][col]);
                load_matrices(y_rest, &sh->v[0][j * 8 + lane % 8][col]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma_f16(out[j], x[i], y[i * 2], y[i * 2 + 1]);
                    mma_f16(out[j], rest[i], y[i * 2], y[i * 2 + 1]);
                    mma_f16(out[j], x[i], y_rest[i * 2], y_rest[i * 2 + 1]);
                }
            }
    }
    for (uint32_t i = warp * 4; i < warp * 4 + 4; i++) { /* key tile i / 2, 32 rows i % 2 */
        uint32_t r[4];
        load_transposed(r, &sh->k[i % 2 * 32 + lane][i / 2 * 8]);
        k[i * 32 + lane] = make_uint4(r[0], r[1], r[2], r[3]);
    }
}

/* One warp: the gates of the chunk's rows, two a lane. Rows that are not there change nothing. */
static __device__ __forceinline__ void prepare_gates(const struct delta_kernel_args &a,
                                                     struct prepare_shared *sh,
                                                     const struct segment &seg, uint32_t first,
                                                     uint32_t head, float *decays)
{
    uint32_t lane = threadIdx.x % 32;
    float g[2];
    for (int i = 0; i < 2; i++) {
        uint32_t row = first + lane * 2 + i;
        float2 gate = make_float2(0, 0);
        if (row < seg.rows)
            gate = delta_gates(a, seg.row + row, head);
        g[i] = gate.x;
        sh->beta[lane * 2 + i] = gate.y;
    }
    double sum = (double)g[0] + g[1];
    for (int off = 1; off < 32; off *= 2) {
        double other = __shfl_up_sync(~0u, sum, off);
        sum += lane >= off ? other : 0;
    }
    double end = __shfl_sync(~0u, sum, 31), at[2] = {sum - g[1], sum};
    for (int i = 0; i < 2; i++) {
        sh->g[lane * 2 + i] = at[i];
        float decay = expf((float)at[i]);
        decays[lane * 2 + i] = decay;
        sh->beta_decay[lane * 2 + i] = sh->beta[lane * 2 + i] * decay;
        decays[CHUNK + lane * 2 + i] = expf(fminf((float)(end - at[i]), 0));
    }
}

/* A to shared memory by the first four warps, the weights of d in o as fragments by the others. */
static __device__ __forceinline__ void prepare_weights(struct prepare_shared *sh,
                                                       const float products[8][4], uint4 *p)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp % 4, pairs[8][2];
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t row = tile * 16 + h * 8 + lane / 4;
            float v[2];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                uint32_t col = j * 8 + lane % 4 * 2 + n;
                bool used = warp < 4 ? col < row : col <= row;
                v[n] = 0;
                if (used)
                    v[n] =
                        products[j][h * 2 + n] * expf(fminf((float)(sh->g[row] - sh->g[col]), 0));
            }
            if (warp < 4 && j < 2 * tile + 2)
                *(float2 *)&sh->t[row][j * 8 + lane % 4 * 2] =
                    make_float2(v[0] * sh->beta[row], v[1] * sh->beta[row]);
            pairs[j][h] = f16_pair(v[0], v[1]);
        }
    if (warp >= 4)
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step++)
            p[(tile * 4 + step) * 32 + lane] =
                make_uint4(pairs[step * 2][0], pairs[step * 2][1], pairs[step * 2 + 1][0],
                           pairs[step * 2 + 1][1]);
}

/* One warp: the inverse of 32 rows and columns of I + A from `base` on in place, a column a lane */
static __device__ __forceinline__ void invert_half(struct prepare_shared *sh, uint32_t base)
{
    uint32_t lane = threadIdx.x % 32;
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float sum[2] = {i == lane ? 1.0f : 0.0f, 0};
#pragma unroll
        for (int l = 0; l < i; l++)
            sum[l % 2] -= sh->t[base + i][base + l] * x[l];
        x[i] = sum[0] + sum[1];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 32; i++)
        sh->t[base + i][base + lane] = x[i];
}

/* out = sign * a b, 32 x 32 each, rows of CHUNK + 4; a thread has four columns of a row. */
static __device__ __forceinline__ void multiply_half(float (*out)[CHUNK + 4], uint32_t out_col,
                                                     const float (*a)[CHUNK + 4], uint32_t a_col,
                                                     const float (*b)[CHUNK + 4], uint32_t b_col,
                                                     float sign)
{
    uint32_t row = threadIdx.x / 8, col = threadIdx.x % 8 * 4;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int l = 0; l < 32; l++) {
        float x = a[row][a_col + l];
        float4 y = *(const float4 *)&b[l][b_col + col];
        sum.x += x * y.x, sum.y += x * y.y, sum.z += x * y.z, sum.w += x * y.w;
    }
    *(float4 *)&out[row][out_col + col] =
        make_float4(sign * sum.x, sign * sum.y, sign * sum.z, sign * sum.w);
}

/* T from A: halves on the diagonal by substitution, then -T22 A21 T11 below them. The quarter above
 * the diagonal holds A21 T11 meanwhile. */
static __device__ __forceinline__ void prepare_inverse(struct prepare_shared *sh)
{
    if (threadIdx.x < 64)
        invert_half(sh, threadIdx.x / 32 * 32);
    __syncthreads();
    multiply_half(sh->t, 32, sh->t + 32, 0, sh->t, 0, 1);
    __syncthreads();
    multiply_half(sh->t + 32, 0, sh->t + 32, 32, sh->t, 32, -1);
}

/* Two neighbours of a row of T, with columns times `by`; 0 above the diagonal. */
static __device__ __forceinline__ float2 scaled_pair(const struct prepare_shared *sh, uint32_t row,
                                                     uint32_t col, const float *by)
{
    float2 v = *(const float2 *)&sh->t[row][col], f = *(const float2 *)(by + col);
    return make_float2(col <= row ? v.x * f.x : 0, col + 1 <= row ? v.y * f.y : 0);
}

/* U transposed: the warp's 16 columns of v, all rows. Both factors in two halves: U is as exact
 * as f32. */
static __device__ __forceinline__ void prepare_u(const struct prepare_shared *sh, float4 *to)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, v[2][4][4];
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
        for (int step = 0; step < 4; step++)
            load_transposed(
                v[part][step],
                &sh->v[part][step * 16 + lane / 16 * 8 + lane % 8][warp * 16 + lane / 8 % 2 * 8]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float out[4] = {};
#pragma unroll
        for (int step = 0; step <= i / 2; step++) {
            uint32_t t[2], rest[2];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float2 x =
                    scaled_pair(sh, i * 8 + lane / 4, step * 16 + n * 8 + lane % 4 * 2, sh->beta);
                t[n] = f16_pair(x.x, x.y);
                rest[n] = f16_rest(t[n], x.x, x.y);
            }
            mma_f16(out, v[0][step], t[0], t[1]);
            mma_f16(out, v[0][step], rest[0], rest[1]);
            mma_f16(out, v[1][step], t[0], t[1]);
        }
        to[(warp * 8 + i) * 32 + lane] = make_float4(out[0], out[1], out[2], out[3]);
    }
}

/* -W: 16 rows and half of the keys a warp. */
static __device__ __forceinline__ void prepare_w(const struct prepare_shared *sh, uint4 *to)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp % 4, half = warp / 4;
    float out[8][4] = {};
#pragma unroll
    for (int step = 0; step < 4; step++)
        if (step <= tile) {
            uint32_t t[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float2 x = scaled_pair(sh, tile * 16 + n % 2 * 8 + lane / 4,
                                       step * 16 + n / 2 * 8 + lane % 4 * 2, sh->beta_decay);
                t[n] = f16_pair(-x.x, -x.y);
            }
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                uint32_t k[4];
                load_transposed(k,
                                &sh->k[step * 16 + lane % 16][half * 64 + i * 8 + lane / 16 * 8]);
                mma_f16(out[i], t, k[0], k[1]);
                mma_f16(out[i + 1], t, k[2], k[3]);
            }
        }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int p = 0; p < 2; p++)
            to[((tile * 2 + h) * 4 + half * 2 + p) * 32 + lane] =
                make_uint4(f16_pair(out[p * 4][h * 2], out[p * 4][h * 2 + 1]),
                           f16_pair(out[p * 4 + 1][h * 2], out[p * 4 + 1][h * 2 + 1]),
                           f16_pair(out[p * 4 + 2][h * 2], out[p * 4 + 2][h * 2 + 1]),
                           f16_pair(out[p * 4 + 3][h * 2], out[p * 4 + 3][h * 2 + 1]));
}

static __global__ void __launch_bounds__(PREPARE_THREADS, 2)
    scan_prepare(const __grid_constant__ struct scan_args s)
{
    extern __shared__ char space[];
    struct prepare_shared *sh = (struct prepare_shared *)space;
    const struct delta_kernel_args &a = s.a;
    overlap_wait();
    overlap_next();
    uint32_t chunk = blockIdx.x, key_head = blockIdx.y, base;
    uint32_t warp = threadIdx.x / 32, ratio = a.value_heads / a.key_heads;
    struct segment seg = chunk_segment(a, chunk, &base);
    uint32_t first = (chunk - base) * CHUNK;
    prepare_rows(a, seg, first, (a.key_heads + key_head) * DIM, true, sh->k, sh->v[0]);
    prepare_rows(a, seg, first, key_head * DIM, true, sh->q, sh->v[1]);
    __syncthreads();
    float products[8][4];
    uint64_t key = (uint64_t)chunk * a.key_heads + key_head;
    prepare_products(sh, products, s.q + key * KEY_FRAGMENTS, s.k + key * KEY_FRAGMENTS);
    __syncthreads();
    for (uint32_t head = key_head * ratio; head < (key_head + 1) * ratio; head++) {
        uint64_t at = (uint64_t)chunk * a.value_heads + head;
        if (warp == 0)
            prepare_gates(a, sh, seg, first, head, s.decays + at * DECAYS);
        prepare_rows(a, seg, first, (2 * a.key_heads + head) * DIM, false, sh->v[0], sh->v[1]);
        __syncthreads();
        prepare_weights(sh, products, s.p + at * P_FRAGMENTS);
        __syncthreads();
        prepare_inverse(sh);
        __syncthreads();
        prepare_u(sh, s.u + at * U_FRAGMENTS);
        prepare_w(sh, s.w + at * W_FRAGMENTS);
        __syncthreads();
    }
}

/* The last three rows of u into the convolution state, after all have read the old. */
static __global__ void scan_store_conv(const struct delta_kernel_args a)
{
    overlap_wait();
    overlap_next();
    uint32_t c = delta_channels(a), channel = blockIdx.x * blockDim.x + threadIdx.x;
    struct segment seg = a.segments[blockIdx.y];
    float *state = a.conv_state + (uint64_t)seg.slot * 3 * c + channel, u[3];
    if (channel >= c)
        return;
    for (int n = 0; n < 3; n++) {
        int64_t from = (int64_t)seg.rows - 3 + n;
        u[n] = from >= 0 ? a.qkv[(seg.row + from) * c + channel]
                         : (seg.pos ? state[(uint64_t)(from + 3) * c] : 0);
    }
    for (int n = 0; n < 3; n++)
        state[(uint64_t)n * c] = u[n];
}

/* ---- the recurrence ----------------------------------------------------------------------- */

struct states_stage {
    uint4 w[W_FRAGMENTS], k[KEY_FRAGMENTS];
    float decay[DECAYS];
};
static_assert(STATES_STAGES * sizeof(struct states_stage) <= CHOICE_LEAST_BYTES,
              "does not fit every GPU");

static __device__ __forceinline__ void states_fetch(const struct scan_args &s,
                                                    struct states_stage *stage, uint32_t chunk,
                                                    uint32_t end, uint32_t head)
{
    if (chunk < end) {
        uint64_t at = (uint64_t)chunk * s.a.value_heads + head;
        uint64_t key = (uint64_t)chunk * s.a.key_heads + head / (s.a.value_heads / s.a.key_heads);
        for (uint32_t i = threadIdx.x; i < W_FRAGMENTS; i += STATES_THREADS) {
            copy_async(stage->w + i, s.w + at * W_FRAGMENTS + i, true);
            copy_async(stage->k + i, s.k + key * KEY_FRAGMENTS + i, true);
        }
        if (threadIdx.x < DECAYS / 4)
            copy_async(stage->decay + threadIdx.x * 4, s.decays + at * DECAYS + threadIdx.x * 4,
                       true);
    }
    copy_commit();
}

/* One chunk for the warp's 16 columns; d goes into the state in two halves. state [key tile][4]: S
 * transposed, as mma leaves it: columns lane / 4 and + 8, keys tile * 8 + lane % 4 * 2 and + 1.
 * out [row tile][4]: U, which becomes d. states: where the S before this chunk is left. */
static __device__ __forceinline__ void states_step(float state[16][4],
                                                   const struct states_stage *in, float out[8][4],
                                                   uint4 *d, uint4 *states)
{
    uint32_t lane = threadIdx.x % 32, operand[8][4], pair[8][2];
#pragma unroll
    for (int step = 0; step < 8; step++) {
        for (int n = 0; n < 4; n++)
            operand[step][n] = f16_pair(state[step * 2 + n / 2][n % 2 * 2],
                                        state[step * 2 + n / 2][n % 2 * 2 + 1]);
        states[step * 32 + lane] =
            make_uint4(operand[step][0], operand[step][1], operand[step][2], operand[step][3]);
    }
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint4 w = in->w[(i * 4 + p) * 32 + lane];
            mma_f16(out[i], operand[p * 2], w.x, w.y);
            mma_f16(out[i], operand[p * 2 + 1], w.z, w.w);
        }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 fade = *(const float2 *)&in->decay[CHUNK + i * 8 + lane % 4 * 2];
        for (int h = 0; h < 2; h++) {
            pair[i][h] = f16_pair(out[i][h * 2], out[i][h * 2 + 1]);
            float low = out[i][h * 2] * fade.x, high = out[i][h * 2 + 1] * fade.y;
            uint32_t rounded = f16_pair(low, high);
            operand[i / 2][i % 2 * 2 + h] = rounded;
            operand[4 + i / 2][i % 2 * 2 + h] = f16_rest(rounded, low, high);
        }
    }
#pragma unroll
    for (int step = 0; step < 4; step++)
        d[step * 32 + lane] = make_uint4(pair[step * 2][0], pair[step * 2][1],
                                         pair[step * 2 + 1][0], pair[step * 2 + 1][1]);
    float decay = in->decay[CHUNK - 1];
#pragma unroll
    for (int i = 0; i < 16; i++)
        for (int n = 0; n < 4; n++)
            state[i][n] *= decay;
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int i = 0; i < 16; i++) {
            uint4 k = in->k[(i * 2 + p) * 32 + lane];
            mma_f16(state[i], operand[p * 2], k.x, k.y);
            mma_f16(state[i], operand[4 + p * 2], k.x, k.y);
            mma_f16(state[i], operand[p * 2 + 1], k.z, k.w);
            mma_f16(state[i], operand[4 + p * 2 + 1], k.z, k.w);
        }
}

/* A block has 64 columns of a value head of a segment; its warps share only what they read. */
static __global__ void __launch_bounds__(STATES_THREADS)
    scan_states(const __grid_constant__ struct scan_args s)
{
    extern __shared__ char space[];
    struct states_stage *stages = (struct states_stage *)space;
    const struct delta_kernel_args &a = s.a;
    overlap_wait();
    overlap_next();
    struct segment seg = a.segments[blockIdx.y];
    uint32_t head = blockIdx.x / 2, lane = threadIdx.x % 32, chunk = 0;
    uint32_t group = blockIdx.x % 2 * 4 + threadIdx.x / 32; /* of 16 columns */
    for (uint32_t i = 0; i < blockIdx.y; i++)
        chunk += segment_chunks(a.segments[i]);
    uint32_t end = chunk + segment_chunks(seg);
    float *own =
        a.state + ((uint64_t)seg.slot * a.value_heads + head) * DIM * DIM + group * 16 + lane / 4;
    float state[16][4];
#pragma unroll
    for (int i = 0; i < 16; i++)
        for (int n = 0; n < 4; n++) {
            uint32_t key = i * 8 + lane % 4 * 2 + n % 2;
            state[i][n] = seg.pos ? own[key * DIM + n / 2 * 8] * VALUE_SCALE : 0;
        }
    for (uint32_t i = 0; i < STATES_STAGES - 1; i++)
        states_fetch(s, &stages[i], chunk + i, end, head);
    uint64_t at = (uint64_t)chunk * a.value_heads + head;
    const float4 *u = s.u + at * U_FRAGMENTS + group * 8 * 32 + lane;
    float next[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++)
        *(float4 *)next[n] = u[n * 32];
#pragma unroll 1
    for (uint32_t i = 0; chunk < end; i++, chunk++, at += a.value_heads) {
        copy_wait<STATES_STAGES - 2>();
        __syncthreads(); /* this stage is there; the one before it has been read */
        states_fetch(s, &stages[(i + STATES_STAGES - 1) % STATES_STAGES], chunk + STATES_STAGES - 1,
                     end, head);
        float out[8][4];
        u += (uint64_t)a.value_heads * U_FRAGMENTS;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            for (int k = 0; k < 4; k++)
                out[n][k] = next[n][k];
            if (chunk + 1 < end)
                *(float4 *)next[n] = u[n * 32];
        }
        states_step(state, &stages[i % STATES_STAGES], out, s.d + at * D_FRAGMENTS + group * 4 * 32,
                    s.states + at * STATE_FRAGMENTS + group * 8 * 32);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        for (int n = 0; n < 4; n++) {
            uint32_t key = i * 8 + lane % 4 * 2 + n % 2;
            own[key * DIM + n / 2 * 8] = state[i][n] * (1.0f / VALUE_SCALE);
        }
}

/* ---- after the recurrence ----------------------------------------------------------------- */

/* y = norm * o * rsqrt(mean(o^2) + eps) * silu(z) for the lane's parts of two rows. */
static __device__ __forceinline__ void outputs_store(const struct delta_kernel_args &a,
                                                     const float out[16][4],
                                                     const struct segment &seg, uint32_t row0,
                                                     uint32_t head)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t row = row0 + lane / 4 + h * 8;
        float square = 0;
#pragma unroll
        for (int i = 0; i < 16; i++)
            square += out[i][h * 2] * out[i][h * 2] + out[i][h * 2 + 1] * out[i][h * 2 + 1];
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        float scale = rsqrtf(square / DIM + a.eps);
        if (row >= seg.rows)
            continue;
        uint64_t at = ((uint64_t)(seg.row + row) * a.value_heads + head) * DIM + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float2 z = *(const float2 *)(a.z + at + i * 8);
            float2 gain = *(const float2 *)(a.norm + lane % 4 * 2 + i * 8);
            *(float2 *)(a.y + at + i * 8) =
                make_float2(gain.x * out[i][h * 2] * scale * silu(z.x),
                            gain.y * out[i][h * 2 + 1] * scale * silu(z.y));
        }
    }
}

/* A warp has 16 rows and all 128 columns. */
static __global__ void __launch_bounds__(OUTPUTS_THREADS)
    scan_outputs(const __grid_constant__ struct scan_args s)
{
    extern __shared__ char space[];
    uint4 *states = (uint4 *)space, *ds = states + STATE_FRAGMENTS;
    const struct delta_kernel_args &a = s.a;
    overlap_wait();
    overlap_next();
    uint32_t chunk = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32;
    uint32_t tile = threadIdx.x / 32, base;
    uint64_t at = (uint64_t)chunk * a.value_heads + head;
    for (uint32_t i = threadIdx.x; i < STATE_FRAGMENTS; i += OUTPUTS_THREADS)
        copy_async(states + i, s.states + at * STATE_FRAGMENTS + i, true);
    copy_commit();
    for (uint32_t i = threadIdx.x; i < D_FRAGMENTS; i += OUTPUTS_THREADS)
        copy_async(ds + i, s.d + at * D_FRAGMENTS + i, true);
    copy_commit();
    uint64_t key = (uint64_t)chunk * a.key_heads + head / (a.value_heads / a.key_heads);
    uint32_t q[8][4];
    float out[16][4] = {};
#pragma unroll
    for (int step = 0; step < 8; step++)
        *(uint4 *)q[step] = s.q[key * KEY_FRAGMENTS + (tile * 8 + step) * 32 + lane];
    struct segment seg = chunk_segment(a, chunk, &base);
    copy_wait<1>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 8; step++)
#pragma unroll
        for (int group = 0; group < 8; group++) {
            uint4 b = states[(group * 8 + step) * 32 + lane];
            mma_f16(out[group * 2], q[step], b.x, b.z);
            mma_f16(out[group * 2 + 1], q[step], b.y, b.w);
        }
    const float *decay = s.decays + at * DECAYS + tile * 16 + lane / 4;
    float fade[2] = {decay[0], decay[8]};
#pragma unroll
    for (int i = 0; i < 16; i++)
        for (int n = 0; n < 4; n++)
            out[i][n] *= fade[n / 2];
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 4; step++)
        if (step <= tile) {
            uint32_t p[4];
            *(uint4 *)p = s.p[at * P_FRAGMENTS + (tile * 4 + step) * 32 + lane];
#pragma unroll
            for (int group = 0; group < 8; group++) {
                uint4 b = ds[(group * 4 + step) * 32 + lane];
                mma_f16(out[group * 2], p, b.x, b.z);
                mma_f16(out[group * 2 + 1], p, b.y, b.w);
            }
        }
#pragma unroll
    for (int i = 0; i < 16; i++)
        for (int n = 0; n < 4; n++)
            out[i][n] *= 0.08838834764831845f / VALUE_SCALE; /* q's 1 / sqrt(128) */
    outputs_store(a, out, seg, (chunk - base) * CHUNK + tile * 16, head);
}

/* ---- the op ------------------------------------------------------------------------------- */

void cuda_delta_scan(struct device *device, const struct delta_kernel_args &args,
                     const struct batch_view *batch)
{
    uint64_t chunks = 0;
    for (uint32_t i = 0; i < batch->segments; i++)
        chunks += cuda_ceil(batch->host_segments[i].rows, CHUNK);
    uint64_t heads = args.value_heads, keys = args.key_heads;
    uint64_t per_chunk =
        (2 * keys * KEY_FRAGMENTS +
         heads * (W_FRAGMENTS + D_FRAGMENTS + P_FRAGMENTS + U_FRAGMENTS + STATE_FRAGMENTS)) *
            sizeof(uint4) +
        heads * DECAYS * sizeof(float);
    struct scan_args s = {};
    s.a = args;
    s.q = (uint4 *)cuda_scratch(device, SCRATCH_DELTA, chunks * per_chunk);
    if (!s.q)
        return;
    s.k = s.q + chunks * keys * KEY_FRAGMENTS;
    s.w = s.k + chunks * keys * KEY_FRAGMENTS;
    s.d = s.w + chunks * heads * W_FRAGMENTS;
    s.p = s.d + chunks * heads * D_FRAGMENTS;
    s.u = (float4 *)(s.p + chunks * heads * P_FRAGMENTS);
    s.states = (uint4 *)(s.u + chunks * heads * U_FRAGMENTS);
    s.decays = (float *)(s.states + chunks * heads * STATE_FRAGMENTS);
    cuda_launch(device, scan_prepare, dim3(chunks, keys), PREPARE_THREADS,
                sizeof(struct prepare_shared), s);
    cuda_launch(device, scan_store_conv,
                dim3(cuda_ceil(delta_channels(args), 256), batch->segments), 256, 0, args);
    cuda_launch(device, scan_states, dim3(heads * 2, batch->segments), STATES_THREADS,
                STATES_STAGES * sizeof(struct states_stage), s);
    cuda_launch(device, scan_outputs, dim3(chunks, heads), OUTPUTS_THREADS,
                (STATE_FRAGMENTS + D_FRAGMENTS) * sizeof(uint4), s);
}
