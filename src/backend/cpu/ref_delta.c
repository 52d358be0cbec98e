/* Reference: the Gated DeltaNet mixer, one token after another. Formulas in op.h. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/ref_math.h"

#include <string.h>

enum { DIM = 128, TAPS = 4 };

/* c[ch] = silu of the causal convolution at one row u; then u becomes the state's newest row. */
static void ref_delta_conv(const float *conv, const float *u, size_t channels,
                           float *state /* [3, channels] */, float *c)
{
    for (size_t ch = 0; ch < channels; ch++) {
        double sum = (double)conv[ch * TAPS + 3] * u[ch];
        for (size_t j = 0; j < TAPS - 1; j++)
            sum += (double)conv[ch * TAPS + j] * state[j * channels + ch];
        c[ch] = (float)ref_silu(sum);
    }
    memmove(state, state + channels, 2 * channels * sizeof *state);
    memcpy(state + 2 * channels, u, channels * sizeof *state);
}

/* out = x * rsqrt(sum x^2 + 1e-6) * scale */
static void ref_delta_l2norm(const float *x, double scale, float *out)
{
    scale /= sqrt(ref_dot(x, x, DIM) + 1e-6);
    for (size_t i = 0; i < DIM; i++)
        out[i] = (float)(x[i] * scale);
}

/* One head, one token: S <- decay S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q. */
static void ref_delta_step(float *state /* [DIM key, DIM value] */, const float *q, const float *k,
                           const float *v, double decay, double beta, float *o)
{
    double d[DIM] = {0}, sum[DIM] = {0};
    for (size_t i = 0; i < DIM; i++)
        for (size_t j = 0; j < DIM; j++)
            d[j] += decay * state[i * DIM + j] * k[i];
    for (size_t j = 0; j < DIM; j++)
        d[j] = beta * (v[j] - d[j]);
    for (size_t i = 0; i < DIM; i++)
        for (size_t j = 0; j < DIM; j++) {
            float s = (float)(decay * state[i * DIM + j] + k[i] * d[j]);
            state[i * DIM + j] = s;
            sum[j] += (double)s * q[i];
        }
    for (size_t j = 0; j < DIM; j++)
        o[j] = (float)sum[j];
}

/* y = norm * o * rsqrt(mean(o^2) + eps) * silu(z), one head. */
static void ref_delta_gate(const float *o, const float *z, const float *norm, float eps, float *y)
{
    double scale = 1 / sqrt(ref_dot(o, o, DIM) / DIM + eps);
    for (size_t i = 0; i < DIM; i++)
        y[i] = (float)(norm[i] * (o[i] * scale) * ref_silu(z[i]));
}

/* All heads of one row. c f32 [channels]: the convolved q | k | v. */
static void ref_delta_row(const struct delta_args *args, size_t row, const float *c, float *state)
{
    size_t key_heads = args->dims.key_heads, value_heads = args->dims.value_heads;
    const float *a = (const float *)cpu_at(args->a) + row * value_heads;
    const float *b = (const float *)cpu_at(args->b) + row * value_heads;
    const float *a_log = cpu_at(args->a_log), *dt_bias = cpu_at(args->dt_bias);
    const float *z = (const float *)cpu_at(args->z) + row * value_heads * DIM;
    float *y = (float *)cpu_at(args->y) + row * value_heads * DIM;
    for (size_t h = 0; h < value_heads; h++) {
        size_t key_head = h / (value_heads / key_heads);
        float q[DIM], k[DIM], o[DIM];
        ref_delta_l2norm(c + key_head * DIM, 1 / sqrt(DIM), q);
        ref_delta_l2norm(c + (key_heads + key_head) * DIM, 1, k);
        const float *v = c + (2 * key_heads + h) * DIM;
        double g = -exp(a_log[h]) * ref_softplus((double)a[h] + dt_bias[h]);
        ref_delta_step(state + h * DIM * DIM, q, k, v, exp(g), ref_sigmoid(b[h]), o);
        ref_delta_gate(o, z + h * DIM, cpu_at(args->norm), args->dims.eps, y + h * DIM);
    }
}

void ref_delta(struct device *device, const struct delta_args *args)
{
    size_t value_heads = args->dims.value_heads;
    size_t channels = (2 * (size_t)args->dims.key_heads + value_heads) * DIM;
    float *c = cpu_scratch(device, 0, channels, sizeof *c);
    if (!c)
        return;
    for (uint32_t i = 0; i < args->batch->segments; i++) {
        const struct segment *s = &args->batch->host_segments[i];
        float *conv_state = (float *)cpu_at(args->conv_state) + s->slot * 3 * channels;
        float *state = (float *)cpu_at(args->state) + s->slot * value_heads * DIM * DIM;
        if (s->pos == 0) {
            memset(conv_state, 0, 3 * channels * sizeof *conv_state);
            memset(state, 0, value_heads * DIM * DIM * sizeof *state);
        }
        for (size_t row = s->row; row < (size_t)s->row + s->rows; row++) {
            const float *u = (const float *)cpu_at(args->qkv) + row * channels;
            ref_delta_conv(cpu_at(args->conv), u, channels, conv_state, c);
            ref_delta_row(args, row, c, state);
        }
    }
}
