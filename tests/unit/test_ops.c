/* The reference ops against values computed by hand, by MLX, and by other formulas. The device is
 * cpu/ref, whose spans are host addresses. Everything else is held against it by kcheck. */
#include "backend/device.h"
#include "base/bf16.h"
#include "base/mem.h"
#include "base/rand.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { HEAD = 256, DIM = 128 };

/* Pitfall 83: ten layers of 262,144 positions pass 2^31 elements. */
_Static_assert(sizeof((struct span){0}.offset) == 8, "offsets are 64-bit");
_Static_assert(sizeof((struct attention_dims){0}.pages) == 8, "page counts are 64-bit");

static struct device *device;

static int test_open(void **state)
{
    (void)state;
    struct err err = {0};
    struct device_options options = {.name = "cpu/ref"};
    return device_open(&options, &device, &err) ? 0 : -1;
}

static int test_close(void **state)
{
    (void)state;
    device_close(device);
    return 0;
}

static struct span at(const void *p)
{
    return (struct span){.base = (void *)(uintptr_t)p};
}

static void assert_near(double want, double got, double tolerance)
{
    if (!(fabs(want - got) <= tolerance))
        fail_msg("want %.9g, got %.9g, tolerance %.3g", want, got, tolerance);
}

static float *normal(struct rand *r, size_t n, double scale)
{
    float *x = mem_new(n, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(rand_normal(r) * scale);
    return x;
}

static struct weight weight_f32(const float *data, uint32_t count, uint32_t rows, uint32_t cols)
{
    return (struct weight){.kind = WEIGHT_F32,
                           .count = count,
                           .rows = rows,
                           .cols = cols,
                           .expert_stride = rows,
                           .data = at(data)};
}

/* ---- weights ------------------------------------------------------------------------------ */

static void embed_rows(const struct weight *table, uint32_t rows, float *x)
{
    int32_t tokens[64];
    struct segment segment = {.rows = rows};
    for (uint32_t r = 0; r < rows; r++)
        tokens[r] = (int32_t)r;
    struct batch_view view = {.rows = rows,
                              .segments = 1,
                              .host_segments = &segment,
                              .device_segments = at(&segment),
                              .tokens = at(tokens)};
    struct embed_args args = {.batch = &view, .table = table, .x = at(x)};
    device_ops(device)->embed(device, &args);
}

/* What MLX itself dequantises (bf16 results). */
static void test_weight_matches_mlx(void **state)
{
    (void)state;
    json_error_t error;
    json_t *root = json_load_file("tests/data/goldens/quant_fixture.json", 0, &error);
    assert_non_null(root);
    size_t i;
    json_t *c;
    json_array_foreach(json_object_get(root, "cases"), i, c)
    {
        struct weight w = {.kind = WEIGHT_AFFINE, .count = 1};
        w.rows = w.expert_stride = (uint32_t)json_integer_value(json_object_get(c, "rows"));
        w.cols = (uint32_t)json_integer_value(json_object_get(c, "cols"));
        w.bits = (uint32_t)json_integer_value(json_object_get(c, "bits"));
        w.group = (uint32_t)json_integer_value(json_object_get(c, "group_size"));
        uint32_t codes[512];
        uint16_t scales[64], biases[64];
        float x[1024];
        json_t *list = json_object_get(c, "codes"), *expected = json_object_get(c, "expected");
        assert_true(json_array_size(list) <= 512 && json_array_size(expected) <= 1024);
        for (size_t k = 0; k < json_array_size(list); k++)
            codes[k] = (uint32_t)json_integer_value(json_array_get(list, k));
        for (size_t k = 0; k < w.rows * w.cols / w.group; k++) {
            list = json_object_get(c, "scales");
            scales[k] = bf16_from_f32((float)json_number_value(json_array_get(list, k)));
            list = json_object_get(c, "biases");
            biases[k] = bf16_from_f32((float)json_number_value(json_array_get(list, k)));
        }
        w.data = at(codes);
        w.scales = at(scales);
        w.biases = at(biases);
        embed_rows(&w, w.rows, x);
        for (size_t k = 0; k < w.rows * w.cols; k++) {
            double want = json_number_value(json_array_get(expected, k));
            assert_near(want, x[k], fabs(want) * 0x1p-8 + 0x1p-9);
        }
    }
    json_decref(root);
}

/* All bits and groups, packed here bit by bit; codes that cross word borders included. */
static void test_weight_bits(void **state)
{
    (void)state;
    static const uint32_t all_bits[] = {2, 3, 4, 5, 6, 8};
    struct rand r = {5};
    for (int b = 0; b < 6; b++)
        for (uint32_t group = 32; group <= 128; group *= 2) {
            uint32_t bits = all_bits[b], cols = 2 * group, code[3][256], words[3 * 64] = {0};
            uint16_t scales[6], biases[6];
            float x[3 * 256];
            for (int g = 0; g < 6; g++) {
                scales[g] = bf16_from_f32((float)(g % 2 ? -0.5 : 0.25) * (float)(g + 1));
                biases[g] = bf16_from_f32((float)g - 3);
            }
            for (uint32_t row = 0; row < 3; row++)
                for (uint32_t k = 0; k < cols; k++) {
                    code[row][k] = (uint32_t)rand_below(&r, 1u << bits);
                    for (uint32_t i = 0; i < bits; i++) {
                        uint32_t bit = k * bits + i;
                        words[row * cols * bits / 32 + bit / 32] |= (code[row][k] >> i & 1)
                                                                    << bit % 32;
                    }
                }
            struct weight w = {.kind = WEIGHT_AFFINE,
                               .count = 1,
                               .rows = 3,
                               .cols = cols,
                               .expert_stride = 3,
                               .bits = bits,
                               .group = group,
                               .data = at(words),
                               .scales = at(scales),
                               .biases = at(biases)};
            embed_rows(&w, 3, x);
            for (uint32_t row = 0; row < 3; row++)
                for (uint32_t k = 0; k < cols; k++) {
                    uint32_t g = row * 2 + k / group;
                    float want =
                        bf16_to_f32(scales[g]) * (float)code[row][k] + bf16_to_f32(biases[g]);
                    assert_true(x[row * cols + k] == want);
                }
        }
}

/* ---- linear ------------------------------------------------------------------------------- */

static void test_linear_by_hand(void **state)
{
    (void)state;
    static const float x[] = {9, 9, 3, 4}, gain[] = {1, 2}, w[] = {1, 1, 2, -1, 0, 1};
    static const uint32_t select[] = {1};
    struct weight weight = weight_f32(w, 1, 3, 2);
    float out[] = {10, 20, 30};
    struct linear_args args = {.rows = 1,
                               .n = 1,
                               .x = at(x),
                               .select = at(select),
                               .gain = at(gain),
                               .weight = {&weight},
                               .out = {at(out)},
                               .add = true};
    device_ops(device)->linear(device, &args);
    double s = 1 / sqrt(12.5), h0 = 3 * s, h1 = 8 * s; /* mean of 9 and 16 */
    assert_near(10 + h0 + h1, out[0], 1e-5);
    assert_near(20 + 2 * h0 - h1, out[1], 1e-5);
    assert_near(30 + h1, out[2], 1e-5);
}

/* ---- delta -------------------------------------------------------------------------------- */

struct delta_case {
    uint32_t rows;
    float *u, *z, *a, *b, *conv, *norm;
    float a_log, dt_bias;
    float conv_state[3 * 3 * DIM], state[DIM * DIM];
    float *y;
};

static void delta_make(struct delta_case *c, uint32_t rows, uint64_t seed)
{
    struct rand r = {seed};
    memset(c, 0x7f, sizeof *c); /* a slot's old contents must not matter */
    c->rows = rows;
    c->u = normal(&r, rows * 3 * DIM, 1);
    c->z = normal(&r, rows * DIM, 1);
    c->a = normal(&r, rows, 1);
    c->b = normal(&r, rows, 1);
    c->conv = normal(&r, 3 * DIM * 4, 0.5);
    c->norm = normal(&r, DIM, 1);
    c->a_log = -1;
    c->dt_bias = 0.5f;
    c->y = mem_new(rows * DIM, sizeof *c->y);
}

static void delta_free(struct delta_case *c)
{
    float *all[] = {c->u, c->z, c->a, c->b, c->conv, c->norm, c->y};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* Rows `from`.. of the case as one segment. */
static void delta_run(struct delta_case *c, uint32_t from, uint32_t rows)
{
    struct segment segment = {.rows = rows, .pos = from};
    struct batch_view view = {
        .rows = rows, .segments = 1, .host_segments = &segment, .device_segments = at(&segment)};
    struct delta_args args = {.batch = &view,
                              .dims = {.key_heads = 1, .value_heads = 1, .eps = 1e-6f},
                              .qkv = at(c->u + from * 3 * DIM),
                              .z = at(c->z + from * DIM),
                              .a = at(c->a + from),
                              .b = at(c->b + from),
                              .conv = at(c->conv),
                              .a_log = at(&c->a_log),
                              .dt_bias = at(&c->dt_bias),
                              .norm = at(c->norm),
                              .conv_state = at(c->conv_state),
                              .state = at(c->state),
                              .y = at(c->y + from * DIM)};
    device_ops(device)->delta(device, &args);
}

/* The same in f64 and by chunks, without stepping the state. With G_t the sum of g in the chunk:
 *   d_t = beta_t (v_t - e^G_t S0^T k_t - sum_{s<t} e^(G_t - G_s) (k_s.k_t) d_s)
 *   o_t = e^G_t S0^T q_t + sum_{s<=t} e^(G_t - G_s) (k_s.q_t) d_s
 *   S  = e^G_n S0 + sum_s e^(G_n - G_s) k_s d_s^T                      every exponent is <= 0 */
enum { CHUNK = 64 };

struct delta_exact {
    double s[DIM][DIM], q[CHUNK][DIM], k[CHUNK][DIM], v[CHUNK][DIM], d[CHUNK][DIM], g[CHUNK];
};

static double dot(const double *a, const double *b)
{
    double sum = 0;
    for (int i = 0; i < DIM; i++)
        sum += a[i] * b[i];
    return sum;
}

static void delta_exact_load(struct delta_exact *e, const struct delta_case *c, uint32_t row,
                             uint32_t t)
{
    double x[3 * DIM];
    for (uint32_t ch = 0; ch < 3 * DIM; ch++) {
        double sum = 0;
        for (uint32_t j = 0; j < 4; j++)
            if (row + j >= 3)
                sum += (double)c->conv[ch * 4 + j] * c->u[(row + j - 3) * 3 * DIM + ch];
        x[ch] = sum / (1 + exp(-sum));
    }
    double q = 1 / sqrt(dot(x, x) + 1e-6) / sqrt(DIM);
    double k = 1 / sqrt(dot(x + DIM, x + DIM) + 1e-6);
    for (int i = 0; i < DIM; i++) {
        e->q[t][i] = x[i] * q;
        e->k[t][i] = x[DIM + i] * k;
        e->v[t][i] = x[2 * DIM + i];
    }
    double a = (double)c->a[row] + c->dt_bias, g = -exp(c->a_log) * (a > 20 ? a : log1p(exp(a)));
    e->g[t] = (t ? e->g[t - 1] : 0) + g;
}

/* Compares y and the state with the case's. */
static void delta_exact_check(const struct delta_case *c, double tolerance)
{
    struct delta_exact *e = mem_new(1, sizeof *e);
    for (uint32_t first = 0; first < c->rows; first += CHUNK) {
        uint32_t n = c->rows - first < CHUNK ? c->rows - first : CHUNK;
        for (uint32_t t = 0; t < n; t++) {
            double o[DIM] = {0}, beta = 1 / (1 + exp(-(double)c->b[first + t])), square = 0;
            delta_exact_load(e, c, first + t, t);
            memset(e->d[t], 0, sizeof e->d[t]);
            for (int i = 0; i < DIM; i++)
                for (int j = 0; j < DIM; j++) {
                    e->d[t][j] -= exp(e->g[t]) * e->s[i][j] * e->k[t][i];
                    o[j] += exp(e->g[t]) * e->s[i][j] * e->q[t][i];
                }
            for (uint32_t s = 0; s < t; s++) {
                double f = exp(e->g[t] - e->g[s]) * dot(e->k[s], e->k[t]);
                for (int j = 0; j < DIM; j++)
                    e->d[t][j] -= f * e->d[s][j];
            }
            for (int j = 0; j < DIM; j++)
                e->d[t][j] = beta * (e->v[t][j] + e->d[t][j]);
            for (uint32_t s = 0; s <= t; s++) {
                double f = exp(e->g[t] - e->g[s]) * dot(e->k[s], e->q[t]);
                for (int j = 0; j < DIM; j++)
                    o[j] += f * e->d[s][j];
            }
            square = dot(o, o) / DIM;
            for (int j = 0; j < DIM; j++) {
                double z = c->z[(first + t) * DIM + j];
                double y = c->norm[j] * o[j] / sqrt(square + 1e-6) * z / (1 + exp(-z));
                assert_near(y, c->y[(first + t) * DIM + j], tolerance * (1 + fabs(y)));
            }
        }
        double last = e->g[n - 1];
        for (int i = 0; i < DIM; i++)
            for (int j = 0; j < DIM; j++) {
                e->s[i][j] *= exp(last);
                for (uint32_t s = 0; s < n; s++)
                    e->s[i][j] += exp(last - e->g[s]) * e->k[s][i] * e->d[s][j];
            }
    }
    for (int i = 0; i < DIM; i++)
        for (int j = 0; j < DIM; j++)
            assert_near(e->s[i][j], c->state[i * DIM + j], tolerance);
    free(e);
}

static void delta_check_length(uint32_t rows)
{
    struct delta_case c;
    delta_make(&c, rows, rows);
    delta_run(&c, 0, rows);
    delta_exact_check(&c, 2e-5);
    delta_free(&c);
}

/* Pitfall 71: every length, not only whole chunks. */
static void test_delta_lengths(void **state)
{
    (void)state;
    bool all = getenv("CALLA_TEST_LONG") != NULL;
    for (uint32_t rows = 1; rows <= 200; rows += all || rows < 5 ? 1 : 13)
        delta_check_length(rows);
    for (uint32_t k = 6; k <= (all ? 13u : 8u); k++)
        for (uint32_t rows = (1u << k) - 1; rows <= (1u << k) + 1; rows++)
            delta_check_length(rows);
}

/* Pitfall 73: prompts shorter than the convolution. The state holds zeros, then the rows. */
static void test_delta_short_prompts(void **state)
{
    (void)state;
    for (uint32_t rows = 1; rows <= 4; rows++) {
        struct delta_case c, split;
        delta_make(&c, rows + 1, 40);
        delta_make(&split, rows + 1, 40);
        delta_run(&c, 0, rows);
        for (uint32_t j = 0; j < 3; j++)
            for (uint32_t ch = 0; ch < 3 * DIM; ch++) {
                float want = j + rows >= 3 ? c.u[(j + rows - 3) * 3 * DIM + ch] : 0;
                assert_true(c.conv_state[j * 3 * DIM + ch] == want);
            }
        delta_run(&c, rows, 1); /* a first step of decoding */
        for (uint32_t t = 0; t <= rows; t++)
            delta_run(&split, t, 1);
        assert_memory_equal(c.y, split.y, (rows + 1) * DIM * sizeof *c.y);
        assert_memory_equal(c.state, split.state, sizeof c.state);
        delta_exact_check(&c, 2e-5);
        delta_free(&c);
        delta_free(&split);
    }
}

/* Pitfall 77: complete forgetting, none at all, and both in turn; nothing may become NaN. */
static void test_delta_extreme_decays(void **state)
{
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        struct delta_case c;
        delta_make(&c, 130, 77 + (uint64_t)kind);
        c.a_log = 0; /* g = -softplus(a + dt_bias) */
        c.dt_bias = 0;
        for (uint32_t t = 0; t < c.rows; t++)
            c.a[t] = kind == 0   ? 30.0f
                     : kind == 1 ? -200.0f
                     : kind == 2 ? (t % 2 ? 30.0f : -200.0f)
                                 : 1000.0f;
        delta_run(&c, 0, c.rows);
        delta_exact_check(&c, 2e-5);
        delta_free(&c);
    }
}

/* One token by hand: S = beta k v^T, so o = beta (q.k) v. */
static void test_delta_first_token(void **state)
{
    (void)state;
    struct delta_case c;
    delta_make(&c, 1, 9);
    for (int i = 0; i < 3 * DIM; i++) {
        c.u[i] = i % DIM == 7 ? 1.0f : 0.0f; /* q, k and v along one axis */
        memcpy(c.conv + i * 4, (float[]){5, 5, 5, 1}, 16);
    }
    c.b[0] = 0;
    delta_run(&c, 0, 1);
    double v = 1 / (1 + exp(-1.0)), k = v / sqrt(v * v + 1e-6); /* silu(1); k^ */
    assert_near(0.5 * v * k, c.state[7 * DIM + 7], 1e-6);
    assert_true(c.state[7 * DIM + 8] == 0 && c.state[8 * DIM + 7] == 0);
    double o = 0.5 * v * k * k / sqrt(DIM), z = c.z[7];
    assert_near(c.norm[7] * o / sqrt(o * o / DIM + 1e-6) * z / (1 + exp(-z)), c.y[7], 1e-4);
    delta_free(&c);
}

/* ---- attention ---------------------------------------------------------------------------- */

struct attention_case {
    uint32_t pages_max, table[2];
    struct segment segment;
    float qg[2 * HEAD], k[HEAD], v[HEAD], gain[HEAD], q[HEAD], y[HEAD];
};

static void attention_run(struct attention_case *c, struct attention_dims dims, struct span k_pages,
                          struct span v_pages)
{
    struct batch_view view = {.rows = 1,
                              .segments = 1,
                              .host_segments = &c->segment,
                              .device_segments = at(&c->segment),
                              .page_table = at(c->table),
                              .pages_max = c->pages_max};
    struct kv_append_args append = {.batch = &view,
                                    .dims = dims,
                                    .qg = at(c->qg),
                                    .k = at(c->k),
                                    .v = at(c->v),
                                    .q_norm = at(c->gain),
                                    .k_norm = at(c->gain),
                                    .k_pages = k_pages,
                                    .v_pages = v_pages,
                                    .q = at(c->q)};
    device_ops(device)->kv_append(device, &append);
    struct attention_args attend = {.batch = &view,
                                    .dims = dims,
                                    .q = at(c->q),
                                    .qg = at(c->qg),
                                    .k_pages = k_pages,
                                    .v_pages = v_pages,
                                    .y = at(c->y)};
    device_ops(device)->attention(device, &attend);
}

static const struct attention_dims one_head = {
    .heads = 1, .kv_heads = 1, .rope_theta = 1e7f, .eps = 1e-6f, .pages = 1};

/* Two positions, rotation, softmax and gate by hand. */
static void test_attention_by_hand(void **state)
{
    (void)state;
    static float k_pages[KV_PAGE * HEAD], v_pages[KV_PAGE * HEAD];
    struct attention_case c = {.pages_max = 1, .segment = {.rows = 1}};
    for (int i = 0; i < HEAD; i++) {
        c.qg[i] = c.k[i] = c.gain[i] = 1;
        c.v[i] = 2;
    }
    attention_run(&c, one_head, at(k_pages), at(v_pages));
    for (int i = 0; i < HEAD; i++) {
        assert_near(1, c.q[i], 1e-5);
        assert_near(1, k_pages[i], 1e-5);
        assert_near(1, c.y[i], 1e-5); /* v times sigmoid(0) */
    }
    c.segment.pos = 1;
    for (int i = 0; i < HEAD; i++)
        c.v[i] = 6;
    c.qg[HEAD + 3] = 100; /* an open gate */
    attention_run(&c, one_head, at(k_pages), at(v_pages));
    double score = 192; /* of position 0: 192 unrotated dims, and 2 cos(angle) a pair */
    for (int i = 0; i < 32; i++) {
        double angle = pow(1e7, -2.0 * i / 64);
        assert_near(cos(angle) - sin(angle), c.q[i], 1e-5);
        assert_near(cos(angle) + sin(angle), c.q[i + 32], 1e-5);
        score += 2 * cos(angle);
    }
    for (int i = 64; i < HEAD; i++)
        assert_near(1, c.q[i], 1e-5);
    double p = 1 / (1 + exp((256 - score) / 16)); /* of position 0; 256 is position 1's own */
    assert_near((2 * p + 6 * (1 - p)) / 2, c.y[0], 1e-4);
    assert_near(2 * p + 6 * (1 - p), c.y[3], 1e-4);
}

/* The angle is an f32 product, whatever the position (pitfall 76's range). */
static void test_attention_rope_far(void **state)
{
    (void)state;
    float *pages = mem_new(KV_PAGE * HEAD, sizeof *pages);
    uint32_t *table = mem_new(1024, sizeof *table);
    struct attention_case c = {.segment = {.rows = 1, .pos = 262143}};
    for (int i = 0; i < HEAD; i++)
        c.qg[i] = c.k[i] = c.gain[i] = 1;
    struct batch_view view = {.rows = 1,
                              .segments = 1,
                              .host_segments = &c.segment,
                              .page_table = at(table),
                              .pages_max = 1024};
    struct kv_append_args append = {.batch = &view,
                                    .dims = one_head,
                                    .qg = at(c.qg),
                                    .k = at(c.k),
                                    .v = at(c.v),
                                    .q_norm = at(c.gain),
                                    .k_norm = at(c.gain),
                                    .k_pages = at(pages),
                                    .v_pages = at(pages),
                                    .q = at(c.q)};
    device_ops(device)->kv_append(device, &append);
    assert_near(cos(262143.0) - sin(262143.0), c.q[0], 1e-5);
    float angle = 262143.0f * (float)pow(1e7, -2.0 * 3 / 64);
    assert_near(cos(angle) + sin(angle), c.q[3 + 32], 1e-5);
    free(pages);
    free(table);
}

/* Pitfall 83: a page whose elements lie behind 2^31. The pool is mapped, not touched. */
static void test_attention_far_page(void **state)
{
    (void)state;
    struct attention_dims dims = one_head;
    struct span k_pages, v_pages;
    struct err err = {0};
    dims.pages = (UINT64_C(1) << 31) / (KV_PAGE * HEAD) + 2;
    dims.kv_kind = KV_BF16;
    uint64_t bytes = dims.pages * KV_PAGE * HEAD * 2;
    if (!device_calls(device)->alloc(device, bytes, &k_pages, &err))
        skip();
    if (!device_calls(device)->alloc(device, bytes, &v_pages, &err)) {
        device_calls(device)->free(device, k_pages);
        skip();
    }
    struct attention_case c = {.pages_max = 1, .segment = {.rows = 1}};
    c.table[0] = (uint32_t)dims.pages - 1;
    for (int i = 0; i < HEAD; i++) {
        c.qg[i] = c.k[i] = c.gain[i] = 1;
        c.v[i] = 3;
    }
    attention_run(&c, dims, k_pages, v_pages);
    uint16_t first, last;
    uint64_t offset = (dims.pages - 1) * KV_PAGE * HEAD * 2;
    device_calls(device)->read(device, &first, v_pages, 2);
    device_calls(device)->read(device, &last, span_at(v_pages, offset), 2);
    assert_true(first == 0 && bf16_to_f32(last) == 3);
    assert_near(1.5, c.y[0], 1e-5);
    device_calls(device)->free(device, k_pages);
    device_calls(device)->free(device, v_pages);
}

/* ---- moe ---------------------------------------------------------------------------------- */

/* Pitfall 82: equal probabilities choose the lowest ids, in ascending order. */
static void test_moe_route_ties(void **state)
{
    (void)state;
    static const float x[] = {1, 1}, gain[] = {1, 1}, shared[] = {1, -1};
    static const float router[] = {0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0}; /* logits 0 1 2 1 2 1 */
    struct weight w = weight_f32(router, 1, 6, 2), shared_w = weight_f32(shared, 1, 1, 2);
    float h[2], weights[4], shared_gate;
    uint32_t ids[4];
    struct moe_route_args args = {
        .rows = 1,
        .dims = {.hidden = 2, .experts = 6, .topk = 4, .renormalise = true},
        .x = at(x),
        .gain = at(gain),
        .router = &w,
        .shared_router = &shared_w,
        .h = at(h),
        .ids = at(ids),
        .weights = at(weights),
        .shared_gate = at(&shared_gate)};
    device_ops(device)->moe_route(device, &args);
    assert_true(ids[0] == 2 && ids[1] == 4 && ids[2] == 1 && ids[3] == 3);
    double e = exp(1.0);
    assert_near(e / (2 * e + 2), weights[0], 1e-6);
    assert_near(1 / (2 * e + 2), weights[3], 1e-6);
    assert_near(0.5, shared_gate, 1e-6);
    args.dims.renormalise = false;
    device_ops(device)->moe_route(device, &args);
    assert_near(e * e / (1 + 3 * e + 2 * e * e), weights[1], 1e-6);
}

static void test_moe_experts_by_hand(void **state)
{
    (void)state;
    static const float h[] = {1, 2}, gate[] = {0, 0, 1, 1}, up[] = {1, 1, 2, 0};
    static const float down[] = {9, 9, 1, -1}, ones[] = {1, 1}, weights[] = {0.5f};
    static const float shared_gate[] = {0.25f};
    static const uint32_t ids[] = {1};
    float x[] = {10, 20};
    struct weight g = weight_f32(gate, 2, 1, 2), u = weight_f32(up, 2, 1, 2);
    struct weight d = weight_f32(down, 2, 2, 1), s = weight_f32(ones, 1, 1, 2);
    struct weight sd = weight_f32(ones, 1, 2, 1);
    struct moe_experts_args args = {
        .rows = 1,
        .dims = {.hidden = 2, .experts = 2, .topk = 1, .width = 1, .shared_width = 1},
        .h = at(h),
        .ids = at(ids),
        .weights = at(weights),
        .shared_gate = at(shared_gate),
        .gate = &g,
        .up = &u,
        .down = &d,
        .shared_gate_proj = &s,
        .shared_up = &s,
        .shared_down = &sd,
        .x = at(x)};
    device_ops(device)->moe_experts(device, &args);
    double silu3 = 3 / (1 + exp(-3.0)); /* both gates see 3; up is 2, the shared up 3 */
    assert_near(10 + 0.5 * silu3 * 2 + 0.25 * silu3 * 3, x[0], 1e-5);
    assert_near(20 - 0.5 * silu3 * 2 + 0.25 * silu3 * 3, x[1], 1e-5);
}

/* ---- sample ------------------------------------------------------------------------------- */

static void test_argmax(void **state)
{
    (void)state;
    float inf = INFINITY;
    float l[][4] = {{1, 3, 3, 2},         {3, NAN, 1, 1},   {-inf, -inf, -inf, -inf},
                    {-inf, -5, -inf, -5}, {inf, 1, inf, 2}, {-0.0f, 0.0f, -1, 0}};
    static const int32_t want[] = {1, -1, -1, 1, 0, 0};
    int32_t ids[6];
    struct argmax_args args = {.rows = 6, .vocab = 4, .logits = at(l), .ids = at(ids)};
    device_ops(device)->argmax(device, &args);
    assert_memory_equal(ids, want, sizeof ids);
}

static void test_top(void **state)
{
    (void)state;
    float l[][5] = {{1, 3, 3, 2, 3}, {0, NAN, 1, 2, 3}, {-INFINITY, 1, -INFINITY, -INFINITY, 0}};
    int32_t ids[3][3];
    float values[3][3], log_sum[3];
    struct top_args args = {.rows = 3,
                            .vocab = 5,
                            .count = 3,
                            .logits = at(l),
                            .ids = at(ids),
                            .values = at(values),
                            .log_sum = at(log_sum)};
    device_ops(device)->top(device, &args);
    assert_true(ids[0][0] == 1 && ids[0][1] == 2 && ids[0][2] == 4);
    assert_true(values[0][0] == 3 && values[0][2] == 3);
    assert_near(log(exp(1.0) + 3 * exp(3.0) + exp(2.0)), log_sum[0], 1e-6);
    assert_true(isnan(log_sum[1]));
    assert_true(ids[2][0] == 1 && ids[2][1] == 4 && ids[2][2] == 0);
    assert_near(log(exp(1.0) + 1), log_sum[2], 1e-6);
}

/* ---- the device --------------------------------------------------------------------------- */

static void test_device_names(void **state)
{
    (void)state;
    struct err err = {0};
    struct device *none = NULL;
    struct device_options options = {.name = "cpu/abacus"};
    assert_false(device_open(&options, &none, &err));
    assert_int_equal(err.kind, ERR_USAGE);
    assert_non_null(strstr(err.text, "cpu/abacus"));
    assert_non_null(strstr(err.text, "cpu/ref"));
    assert_string_equal(device_name(0), "cpu/ref");
    assert_string_equal(device_head(device)->name, "cpu/ref");
    options = (struct device_options){.name = "cpu/ref", .without = "graphs"};
    assert_false(device_open(&options, &none, &err));
    assert_non_null(strstr(err.text, "cannot do without 'graphs'"));
}

/* A backend that others have says why it is not here. */
static void test_a_missing_gpu_has_a_reason(void **state)
{
    (void)state;
    struct err err = {0};
    struct device *none = NULL;
    struct device_options options = {.name = "cuda"};
    for (int i = 0; device_name(i); i++)
        if (!strcmp(device_name(i), "cuda"))
            skip();
    assert_false(device_open(&options, &none, &err));
    assert_non_null(strstr(err.text, "no device 'cuda' here ("));
    assert_non_null(strstr(err.text, "choose one of: cpu/ref"));
}

/* More than any machine has is an error with a hint, not a crash; memory is aligned and zeroed. */
static void test_device_alloc(void **state)
{
    (void)state;
    struct err err = {0};
    struct span s;
    assert_false(device_calls(device)->alloc(device, UINT64_MAX - 100, &s, &err));
    assert_int_equal(err.kind, ERR_RESOURCE);
    for (uint64_t bytes = 1; bytes < (1u << 22); bytes *= 37) {
        assert_true(device_calls(device)->alloc(device, bytes, &s, &err));
        const uint8_t *p = s.base;
        assert_true((uintptr_t)p % 64 == 0 && p[0] == 0 && p[bytes - 1] == 0);
        device_calls(device)->free(device, s);
    }
    assert_true(device_calls(device)->sync(device, &err));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weight_matches_mlx),
        cmocka_unit_test(test_weight_bits),
        cmocka_unit_test(test_linear_by_hand),
        cmocka_unit_test(test_delta_lengths),
        cmocka_unit_test(test_delta_short_prompts),
        cmocka_unit_test(test_delta_extreme_decays),
        cmocka_unit_test(test_delta_first_token),
        cmocka_unit_test(test_attention_by_hand),
        cmocka_unit_test(test_attention_rope_far),
        cmocka_unit_test(test_attention_far_page),
        cmocka_unit_test(test_moe_route_ties),
        cmocka_unit_test(test_moe_experts_by_hand),
        cmocka_unit_test(test_argmax),
        cmocka_unit_test(test_top),
        cmocka_unit_test(test_device_names),
        cmocka_unit_test(test_a_missing_gpu_has_a_reason),
        cmocka_unit_test(test_device_alloc),
    };
    return cmocka_run_group_tests(tests, test_open, test_close);
}
