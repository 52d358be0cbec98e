/* kcheck: every op of every level against the C reference.
 *
 * A case builds inputs from its seed, then runs one program three times: on cpu/ref, and twice on
 * the tested device. Inputs must come back unchanged, the bytes around every buffer too, the two
 * runs must be bit-equal (the second is made by the level whose bits the tested one promises, if
 * there is one), and each output must lie within a tolerance that the case derives from
 * its own inputs. A program that drives a stateful op runs one token at a time on the reference
 * and in random chunks on the tested device. With --deterministic the second run on the tested
 * device cuts its rows and chunks differently from the first, and must be bit-equal still. */
#ifndef KCHECK_H
#define KCHECK_H

#include "backend/device.h"
#include "base/rand.h"

#include <math.h>

enum { KC_GUARD = 256, KC_ITEMS = 64 };

#define KC_U 0x1p-24     /* half the distance of 1 to the next f32: relative rounding error */
#define KC_U_BF16 0x1p-9 /* the same for bf16 */
#define KC_U_F16 0x1p-12
#define KC_U_I16 0x1p-16 /* half a step of 16-bit integers, of their largest */

enum kc_pool { KC_REAL, KC_EDGE, KC_RANDOM, KC_POOLS };

enum kc_use {
    KC_IN,    /* must come back unchanged */
    KC_OUT,   /* starts as `init` or as poison; compared after the run */
    KC_STAGE, /* the program writes and reads it itself */
    KC_HOST,  /* not on the device: the program leaves results in result[run] */
};

struct kc_buf {
    const char *name;
    uint64_t bytes;
    enum kc_use use;
    uint8_t *init;       /* [bytes], or null: poison */
    struct span span[2]; /* reference, tested; points behind the front guard */
    uint8_t *result[3];  /* KC_OUT, KC_HOST: of each run */
};

struct kc_weight {
    struct weight w[2]; /* reference, tested */
    void *memory[3];
};

/* Where a program runs: run 0 is the reference, 1 and 2 the tested device. */
struct kc_side {
    int run;
    struct device *device;
    const struct ops *ops;
};

struct kc {
    /* set by the driver */
    struct device *ref, *dev;
    const struct ops *ops; /* of dev; a planted fault replaces one */
    struct device *twin;   /* of the level whose bits dev promises, or null */
    const char *op, *level;
    enum kc_pool pool;
    int index;
    struct rand rand;
    double input_rounding; /* of the inputs of large products: 0, KC_U_BF16 or KC_U_F16 */
    bool integer_inputs;   /* fast_tile.h: of products with codes of 4 bits in groups of 64 */
    bool bench;
    bool deterministic; /* dev was opened so */
    /* set by the case */
    char shape[160];
    double flops, bytes; /* of one call, for --bench */
    /* results */
    bool failed, skipped;
    double worst; /* largest error as a share of its tolerance */
    char message[400];
    double seconds; /* of one call, with --bench */
    /* items of the running case, and weights until the device closes */
    struct kc_buf bufs[KC_ITEMS];
    int buf_count;
    struct kc_weight **weights;
    int weight_count;
    /* timing, see KC_CALL */
    bool timing;
    uint64_t reps, left, start_ns;
};

struct kc_op {
    const char *name;
    int cases[2]; /* real, edge; random ones are as many as asked for */
    void (*check)(struct kc *kc);
};

extern const struct kc_op kc_ops[];
extern const int kc_op_count;

void kc_check_embed(struct kc *kc);
void kc_check_copy(struct kc *kc);
void kc_check_linear(struct kc *kc);
void kc_check_delta(struct kc *kc);
void kc_check_kv_append(struct kc *kc);
void kc_check_attention(struct kc *kc);
void kc_check_moe_route(struct kc *kc);
void kc_check_moe_experts(struct kc *kc);
void kc_check_argmax(struct kc *kc);
void kc_check_top(struct kc *kc);
enum { KC_LINEAR_REAL = 13, KC_LINEAR_EDGE = 69 };

/* ---- kc_case.c: buffers, weights, runs ---------------------------------------------------- */

void kc_fail(struct kc *kc, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A buffer of the case; `data` is copied, null means poison. Freed with the case. */
struct kc_buf *kc_buf(struct kc *kc, const char *name, enum kc_use use, const void *data,
                      uint64_t bytes);

static inline struct span kc_at(const struct kc_buf *b, const struct kc_side *side)
{
    return b->span[side->run > 0];
}

/* A weight with random contents, scales of both signs. kind AFFINE uses bits and group. */
struct kc_weight *kc_weight(struct kc *kc, enum weight_kind kind, uint32_t bits, uint32_t group,
                            uint32_t count, uint32_t rows, uint32_t cols);

/* After its contents are as they should be: hands it to both devices. */
void kc_weight_load(struct kc *kc, struct kc_weight *w);

static inline const struct weight *kc_w(const struct kc_weight *w, const struct kc_side *side)
{
    return &w->w[side->run > 0];
}

/* bound[k] >= |scale * code| + |bias|: the magnitudes that a kernel may add up. */
void kc_weight_bound(const struct weight *w, uint32_t item, uint32_t row, float *bound);

/* Stage buffers: write rows, poison all, read `bytes` and see that the rest is still poison. */
void kc_stage_write(struct kc *kc, const struct kc_side *side, struct kc_buf *b, const void *data,
                    uint64_t bytes);
void kc_stage_poison(struct kc *kc, const struct kc_side *side, struct kc_buf *b);
void kc_stage_read(struct kc *kc, const struct kc_side *side, struct kc_buf *b, void *data,
                   uint64_t bytes);

/* A norm's epsilon: the real one, or in every other case of the other pools one so large that an
 * op that forgets it shows. */
static inline float kc_eps(const struct kc *kc)
{
    return kc->pool != KC_REAL && kc->index % 2 ? 0.25f : 1e-6f;
}

/* Runs the program on all three sides and makes the checks that need no tolerance. False when the
 * case is over (failed or skipped). */
bool kc_run(struct kc *kc, void (*program)(struct kc *, const struct kc_side *, void *),
            void *user);

/* got[i] within tolerance[i] of want[i]; want null: the reference's result as f32. */
void kc_compare(struct kc *kc, const struct kc_buf *b, const double *want, const double *tolerance,
                size_t n);
void kc_compare_value(struct kc *kc, const char *name, size_t at, double want, double got,
                      double tolerance);
void kc_compare_bytes(struct kc *kc, const struct kc_buf *b);

/* Calls an op on a side. With --bench, the tested side's call repeats for a while and is timed. */
#define KC_CALL(kc, side, op, args)                                                                \
    for (kc_time_start(kc, side); kc_time_more(kc, side);)                                         \
    (side)->ops->op((side)->device, args)
void kc_time_start(struct kc *kc, const struct kc_side *side);
bool kc_time_more(struct kc *kc, const struct kc_side *side);

void kc_case_free(struct kc *kc);    /* buffers */
void kc_weights_free(struct kc *kc); /* after the devices are closed */

/* ---- kc_data.c: random inputs, error bounds, plans ---------------------------------------- */

uint32_t kc_between(struct kc *kc, uint32_t lo, uint32_t hi); /* both included */
bool kc_chance(struct kc *kc, double p);
float *kc_normal(struct kc *kc, size_t n, double scale); /* the caller frees it */
uint32_t kc_pick_bits(struct kc *kc);
uint32_t kc_pick_group(struct kc *kc);

/* Bound of |computed - exact| of one product sum of n terms:
 *   4 u (sqrt(n) + 8) sum m|h|  +  4 sqrt(2) u_in sqrt(sum w^2 h^2)
 * u = 2^-24: sums in f32 in any order err like a random walk, 4 is its tail; + 8 for the scale of
 * the inputs (their norm). m bounds the magnitudes that are really added (codes and biases apart).
 * u_in = 2^-9 where a level rounds both factors to bf16. */
double kc_dot_bound(const struct kc *kc, double sum_abs, double sum_squares, size_t n);

/* What rounding h to 16-bit integers adds to that, where a level does so for products with w:
 *   4 u_16 sqrt(sum w^2 p^2),  u_16 = 2^-16, p the largest |h| of the block of 64
 * kc_peaks sets p [cols] of a row h [cols], or zeros; sum_squares is of w p. */
void kc_peaks(const struct kc *kc, const struct weight *w, const double *h, double *p);
double kc_peak_bound(double sum_squares);

/* Sequences with lengths and slots of their own, cut into batches. */
enum { KC_SEQS = 6 };

struct kc_seq {
    uint32_t slot, start, rows; /* rows from position start on */
    size_t first;               /* index of its first row in the case's [total] arrays */
};

struct kc_plan {
    struct kc_seq seq[KC_SEQS];
    uint32_t seqs, slots, total, max_pos;
    bool chunked; /* the tested side may cut at random; else one batch with everything */
    uint64_t seed;
    struct kc_buf *segments, *tokens; /* stage */
};

/* Up to `seqs` sequences of up to `rows` rows (`exact` rows when set). start > 0 where `resume`. */
void kc_plan_make(struct kc *kc, struct kc_plan *plan, uint32_t seqs, uint32_t rows, bool exact,
                  uint32_t resume);

/* What a side cuts its batches by: the same for both runs on the tested device, unless the device
 * is deterministic. */
struct rand kc_cuts(const struct kc *kc, const struct kc_side *side, uint64_t seed);

/* How many of `left` rows the next call of a row-wise op takes: all, or some where runs are cut
 * differently. */
uint32_t kc_piece(const struct kc *kc, const struct kc_side *side, struct rand *cuts,
                  uint32_t left);

/* The next batch of the plan on this side: fills view and from[row] = index into [total] arrays.
 * `done` [KC_SEQS] holds the progress and begins at zero. False when all is done. */
bool kc_plan_next(struct kc *kc, const struct kc_side *side, const struct kc_plan *plan,
                  struct rand *rand, uint32_t *done, struct segment *segments,
                  struct batch_view *view, size_t *from);

/* Moves rows of `width` floats between an array [total, width] and a stage buffer. */
void kc_gather(struct kc *kc, const struct kc_side *side, struct kc_buf *b, const float *all,
               const size_t *from, uint32_t rows, size_t width);
void kc_scatter(struct kc *kc, const struct kc_side *side, struct kc_buf *b, void *all,
                const size_t *from, uint32_t rows, size_t width);

/* ---- kc_faults.c -------------------------------------------------------------------------- */

struct kc_fault {
    const char *name, *op;
    void (*plant)(struct ops *ops);
};

extern const struct kc_fault kc_faults[];
extern const int kc_fault_count;

#endif
