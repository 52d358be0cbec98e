/* The op table: what a device must be able to do to run the model's forward pass.
 *
 * It knows devices, memory and matrices; it knows no model. The plain C versions in
 * backend/cpu/ref_<family>.c are the specification of every op; kcheck holds each other version
 * against them. Every backend implements every op or refuses to open and names what is missing.
 *
 * Conventions
 *   - All matrices are row-major. `rows` counts tokens, the leading dimension of every activation.
 *   - Activations are f32. Weights are read as a checkpoint stores them (see struct weight).
 *   - Sums may be taken in any order in f32 or better; the reference takes them in double.
 *   - Ties in top-k and argmax go to the lowest index.
 *   - Outputs never overlap inputs, except where an argument says "in place".
 *   - Ops are encoded on the device's one stream, in order, and return nothing. The stream keeps
 *     its first error; device_sync hands it out. */
#ifndef BACKEND_OP_H
#define BACKEND_OP_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct device; /* defined by each backend; begins with struct device_head */

/* A place in device memory. On a CPU `base` is the address; on Metal it is the buffer object. */
struct span {
    void *base;
    uint64_t offset; /* bytes from base */
};

static inline struct span span_at(struct span s, uint64_t bytes)
{
    s.offset += bytes;
    return s;
}

/* ---- weights ------------------------------------------------------------------------------ */

enum weight_kind {
    WEIGHT_NONE = 0,
    WEIGHT_F32,    /* f32 [count, rows, cols] */
    WEIGHT_BF16,   /* bf16 [count, rows, cols] */
    WEIGHT_AFFINE, /* MLX: w[r][k] = scales[r][k/group] * code[r][k] + biases[r][k/group] */
};

/* One matrix [rows, cols] (outputs, inputs), or `count` of them (the experts of a layer).
 *
 * WEIGHT_AFFINE: codes are u32 words [count, rows, cols * bits / 32], the row one little-endian
 * bit stream with code k at bits k*bits; scales and biases are bf16 [count, rows, cols / group].
 * bits in {2, 3, 4, 5, 6, 8}, group in {32, 64, 128}, cols a multiple of group. Scales can be
 * negative. Source: the MLX checkpoints' layout, `docs/model.md`.
 *
 * Matrix e begins e * expert_stride rows after the first: `rows` as a rule; 2 * rows where a
 * Hugging Face file holds gate and up fused as halves of one [count, 2 * rows, cols] tensor. */
struct weight {
    enum weight_kind kind;
    uint32_t count, rows, cols;
    uint32_t expert_stride;           /* rows from one matrix to the next, at least `rows` */
    uint32_t bits, group;             /* WEIGHT_AFFINE only */
    struct span data, scales, biases; /* data: f32, bf16 or the codes */
    void *repacked; /* the backend's own form of it, or null; the backend's to free */
};

/* ---- a batch ------------------------------------------------------------------------------ */

enum { KV_PAGE = 256 }; /* positions in a KV page */

/* Consecutive rows of one sequence inside a batch. A sequence has at most one segment a batch. */
struct segment {
    uint32_t slot; /* of the sequence's states, and its row of the page table */
    uint32_t row;  /* first row in the batch */
    uint32_t rows; /* at least 1 */
    uint32_t pos;  /* position in the sequence of the first row; 0 means that the state is empty */
};

/* What sequence-aware ops see of a batch. The host arrays choose the method (by shapes only); the
 * device copies hold what a recorded step re-reads. Segments cover rows 0..rows-1 in order. */
struct batch_view {
    uint32_t rows, segments;
    const struct segment *host_segments; /* [segments] */
    struct span device_segments;         /* struct segment [segments] */
    struct span tokens;                  /* i32 [rows] */
    struct span page_table;              /* u32 [slots, pages_max]: page of positions p*256.. */
    uint32_t pages_max;
};

/* ---- arguments, one struct an op ---------------------------------------------------------- */

/* x[r] = table[tokens[r]]. A token below 0 is a choice that failed (see argmax), and whoever reads
 * it ignores the row: it stands for token 0. One past the table is a bug of the caller. */
struct embed_args {
    const struct batch_view *batch;
    const struct weight *table; /* [vocab, hidden] */
    struct span x;              /* out f32 [rows, hidden] */
};

enum { LINEAR_MAX = 4 };

/* h = gain ? rms_norm(x; gain, eps) : x,   rms_norm(x)[k] = x[k] * rsqrt(mean(x^2) + eps) * gain[k]
 * out[i][r] = W[i] h[r]  (+ out[i][r] when add)                       for i in 0..n-1
 *
 * Fuses the norm before a group of projections (q|k|v, or qkv|z|a|b) and the residual after one.
 * When `select` has a base, row r of h is taken from row select[r] of x (the rows that need
 * logits), and `rows` counts the selected ones. */
struct linear_args {
    uint32_t rows, n;
    struct span x;      /* f32 [*, cols] */
    struct span select; /* u32 [rows], or base null */
    struct span gain;   /* f32 [cols], or base null: no norm */
    float eps;
    const struct weight *weight[LINEAR_MAX]; /* all with the same cols */
    struct span out[LINEAR_MAX];             /* f32 [rows, weight[i]->rows] */
    bool add;                                /* in place: adds to out instead of setting it */
};

/* The Gated DeltaNet mixer between its projections (formulas: docs/model.md, "Gated DeltaNet").
 * Per segment, with C = 2*key_heads*128 + value_heads*128 channels, dims 128 each:
 *   c_t[ch] = silu(sum_j conv[ch][j] * u[t-3+j][ch]),   j = 0..3, conv[ch][3] the current row;
 *             rows before the segment come from conv_state
 *   c = q [key_heads,128] | k [key_heads,128] | v [value_heads,128]; value head h reads key head
 *   h / (value_heads / key_heads)
 *   q^ = q * rsqrt(sum q^2 + 1e-6) / sqrt(128),  k^ = k * rsqrt(sum k^2 + 1e-6)
 *   g = -exp(a_log) * softplus(a + dt_bias) (<= 0; softplus(x) = x above 20),  beta = sigmoid(b)
 *   S <- e^g S;  d = beta (v - S^T k^);  S <- S + k^ d^T;  o = S^T q^
 *   y = norm[i] * o * rsqrt(mean(o^2) + eps) * silu(z)
 * Updates both states. A segment with pos 0 ignores what the states held and starts from zero. */
struct delta_dims {
    uint32_t key_heads, value_heads; /* of 128 dims each */
    float eps;
};

struct delta_args {
    const struct batch_view *batch;
    struct delta_dims dims;
    struct span qkv;        /* f32 [rows, C], the pre-conv projection u */
    struct span z;          /* f32 [rows, value_heads * 128] */
    struct span a, b;       /* f32 [rows, value_heads] */
    struct span conv;       /* f32 [C, 4], oldest tap first */
    struct span a_log;      /* f32 [value_heads] */
    struct span dt_bias;    /* f32 [value_heads] */
    struct span norm;       /* f32 [128] */
    struct span conv_state; /* in place f32 [slots, 3, C]: the last three rows of u, oldest first */
    struct span state;      /* in place f32 [slots, value_heads, 128 (key), 128 (value)] */
    struct span y;          /* out f32 [rows, value_heads * 128] */
};

enum kv_kind { KV_F32, KV_BF16 };

/* head_dim is 256, of which the first 64 are rotated, in every model of the family. */
struct attention_dims {
    uint32_t heads, kv_heads; /* query head j reads KV head j / (heads / kv_heads) */
    float rope_theta;
    float eps;
    enum kv_kind kv_kind;
    uint64_t pages; /* in the pool of this layer */
};

/* Takes the projections apart, normalises and rotates, appends K and V to the pages, leaves q.
 *   qg row: per head [q 256 | gate 256]
 *   q_j = rope(rms_norm(q_j; q_norm), pos),  k_j = rope(rms_norm(k_j; k_norm), pos)
 *   rope: i in 0..31, angle = pos * theta^(-2i/64): (x_i, x_i+32) rotated; dims 64.. unchanged */
struct kv_append_args {
    const struct batch_view *batch;
    struct attention_dims dims;
    struct span qg;             /* f32 [rows, heads, 512] */
    struct span k, v;           /* f32 [rows, kv_heads, 256] */
    struct span q_norm, k_norm; /* f32 [256] */
    struct span k_pages;        /* kv_kind [pages, kv_heads, KV_PAGE, 256] */
    struct span v_pages;        /* kv_kind [pages, kv_heads, KV_PAGE, 256] */
    struct span q;              /* out f32 [rows, heads, 256] */
};

/* Causal attention over the pages, then the output gate.
 *   p = softmax_{s <= pos}(q_j . k_{s} / 16);  y_j = (sum_s p_s v_s) * sigmoid(gate_j) */
struct attention_args {
    const struct batch_view *batch;
    struct attention_dims dims;
    struct span q;                /* f32 [rows, heads, 256] */
    struct span qg;               /* f32 [rows, heads, 512]: its second halves are the gates */
    struct span k_pages, v_pages; /* as in kv_append_args */
    struct span y;                /* out f32 [rows, heads * 256] */
};

struct moe_dims {
    uint32_t hidden, experts, topk;
    uint32_t width, shared_width; /* of a routed expert, of the shared one */
    bool renormalise;             /* weights of the chosen experts sum to 1 */
    float eps;
};

/* h = rms_norm(x; gain);  l = router h;  p = softmax(l)
 * ids = the topk largest of l, descending, ties to the lowest id;
 * weights = p[ids] (/ their sum when renormalise);  shared_gate = sigmoid(shared_router h) */
struct moe_route_args {
    uint32_t rows;
    struct moe_dims dims;
    struct span x;                      /* f32 [rows, hidden] */
    struct span gain;                   /* f32 [hidden] */
    const struct weight *router;        /* [experts, hidden] */
    const struct weight *shared_router; /* [1, hidden] */
    struct span h;                      /* out f32 [rows, hidden] */
    struct span ids;                    /* out u32 [rows, topk] */
    struct span weights;                /* out f32 [rows, topk] */
    struct span shared_gate;            /* out f32 [rows] */
};

/* x += sum_e weights_e * down_e(silu(gate_e h) * up_e h) + shared_gate * shared(h) */
struct moe_experts_args {
    uint32_t rows;
    struct moe_dims dims;
    struct span h, ids, weights, shared_gate; /* as moe_route leaves them */
    const struct weight *gate, *up;           /* [experts] of [width, hidden] */
    const struct weight *down;                /* [experts] of [hidden, width] */
    const struct weight *shared_gate_proj, *shared_up, *shared_down;
    struct span x; /* in place f32 [rows, hidden] */
};

/* ids[r] = argmax of logits[r]; -1 when a logit of the row is NaN or none is finite. */
struct argmax_args {
    uint32_t rows, vocab;
    struct span logits; /* f32 [rows, vocab] */
    struct span ids;    /* out i32 [rows] */
};

/* The `count` largest logits of each row, descending, ties to the lowest id, and
 * log(sum(exp(logits))) of the whole row. A row with a NaN gets a NaN there. count is at most 1024
 * and at most vocab. */
struct top_args {
    uint32_t rows, vocab, count;
    struct span logits;  /* f32 [rows, vocab] */
    struct span ids;     /* out i32 [rows, count] */
    struct span values;  /* out f32 [rows, count] */
    struct span log_sum; /* out f32 [rows] */
};

/* ---- the table ---------------------------------------------------------------------------- */

struct ops {
    void (*embed)(struct device *, const struct embed_args *);
    void (*linear)(struct device *, const struct linear_args *);
    void (*delta)(struct device *, const struct delta_args *);
    void (*kv_append)(struct device *, const struct kv_append_args *);
    void (*attention)(struct device *, const struct attention_args *);
    /* Bytes of scratch that attention takes for a batch of these rows and host_segments (it reads
     * no more of it). Null where that does not grow with the positions. */
    uint64_t (*attention_scratch)(const struct device *, const struct attention_dims *,
                                  const struct batch_view *);
    void (*moe_route)(struct device *, const struct moe_route_args *);
    void (*moe_experts)(struct device *, const struct moe_experts_args *);
    void (*argmax)(struct device *, const struct argmax_args *);
    void (*top)(struct device *, const struct top_args *);
    void (*copy)(struct device *, struct span to, struct span from, uint64_t bytes);
};

/* Memory, transfer and synchronisation of a device. */
struct device_calls {
    /* Device memory for the life of the device or until free. Zeroed. */
    bool (*alloc)(struct device *, uint64_t bytes, struct span *out, struct err *);
    void (*free)(struct device *, struct span);
    /* Announces memory in which weights lie, before they are loaded; it stays mapped while the
     * device is open. Null where a device has no use for it. */
    bool (*map)(struct device *, const void *base, uint64_t bytes, struct err *);
    /* Makes w usable by the ops. In: data, scales, biases are host addresses (offset 0) that stay
     * mapped while the device is open. Out: whatever the device wants; a CPU leaves them. */
    bool (*load_weight)(struct device *, struct weight *w, struct err *);
    /* Both wait until the stream reaches them and the bytes are there. */
    void (*write)(struct device *, struct span to, const void *from, uint64_t bytes);
    void (*read)(struct device *, void *to, struct span from, uint64_t bytes);
    /* Waits for all that was encoded; false with the stream's first error, which is cleared. */
    bool (*sync)(struct device *, struct err *);
    /* Both null where an op has ended when its call returns. fetch asks for the bytes that stand
     * here when the stream comes by, and lets the device begin; collect waits for them and for
     * nothing encoded later, and is false with the stream's first error, which is cleared. One
     * fetch at a time, and what is encoded in between does not change its bytes. */
    void (*fetch)(struct device *, struct span from, uint32_t bytes);
    bool (*collect)(struct device *, void *to, struct err *);
    void (*close)(struct device *);
    /* Both null where a device has no use for them. A step is the ops of one forward pass; steps
     * of one key encode the same ops with the same arguments, and what differs lies in device
     * memory. step_begin returns true when it could queue an earlier recording: nothing is left to
     * encode. Else the caller encodes the ops, no reads or writes between, and calls step_end. */
    bool (*step_begin)(struct device *, uint64_t key);
    void (*step_end)(struct device *);
};

struct device_head {
    const char *name;      /* "cpu/ref", "cpu/avx2", "cuda", "metal/tensor" */
    enum kv_kind kv_kind;  /* what this device prefers */
    uint32_t prefill_rows; /* rows of a prompt a step at which it is fastest; 0: 512 */
    uint64_t memory_bytes; /* that a model can have on the device, 0 when unknown */
    struct ops ops;
    struct device_calls calls;
};

static inline const struct device_head *device_head(const struct device *d)
{
    return (const struct device_head *)d;
}

static inline uint32_t device_prefill_rows(const struct device *d)
{
    uint32_t rows = device_head(d)->prefill_rows;
    return rows ? rows : 512;
}

static inline const struct ops *device_ops(const struct device *d)
{
    return &device_head(d)->ops;
}

static inline const struct device_calls *device_calls(const struct device *d)
{
    return &device_head(d)->calls;
}

#endif
