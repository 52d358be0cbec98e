/* Attention for the fast levels: norm, rotation and append; then softmax over the pages in tiles.
 *
 * A tile is 64 positions of a KV head, for up to 64 queries: the query heads that share it, of one
 * row or of several. Both its products keep 8 queries x 2 vectors of sums in registers (4 x 2 where
 * there are 16), and a step multiplies two vectors of the tile by one number of each query. For the
 * scores the vectors are one dimension of a strip of positions, so nothing is summed across a
 * vector and scores lie as the softmax wants them; the keys are transposed for it, once a tile.
 * bf16 is transposed in pairs and widened in the product, by a shift and a mask of what one load
 * brings; a strip of values gives its even dimensions and its odd ones that way, and the sums stay
 * in that order until they are done. Each product asks for the memory that the next one reads.
 *
 * A running maximum and sum (the online softmax) carry each query over the tiles of a page, and the
 * pages' results are joined in order. Prompts: a task is one KV head and a few rows, over all their
 * pages. Decoding: a task is one KV head, or some of its query heads, and one page; a second pass
 * joins. Both do the same arithmetic: a row's outcome depends neither on the rows beside it nor on
 * how many workers there are. */
#include "backend/cpu/fast.h"
#include "base/pool.h"

#include <assert.h>
#include <math.h>

enum {
    ATTENTION_DIM = 256,
    ATTENTION_ROTATED = 64,
    ATTENTION_TILE = 64,              /* positions; a page is a whole number of tiles */
    ATTENTION_STRIP = 2 * VF,         /* positions of keys, dimensions of values, of a step */
    ATTENTION_PACK = VF == 8 ? 4 : 8, /* queries whose sums fit the registers */
    ATTENTION_QUERIES = 64,           /* of a task: rows x heads that share a KV head */
    ATTENTION_FEW_ROWS = 4,           /* segments up to here are split by pages */
};

/* Address of (position, kv head) of the sequence in `slot`, in elements: 64 bits, because ten
 * layers of 262,144 positions pass 2^31. */
static uint64_t attention_at(const struct batch_view *batch, const struct attention_dims *dims,
                             uint32_t slot, uint32_t pos, uint32_t kv_head)
{
    const uint32_t *table = cpu_at(batch->page_table);
    assert(pos / KV_PAGE < batch->pages_max);
    uint64_t page = table[(uint64_t)slot * batch->pages_max + pos / KV_PAGE];
    assert(page < dims->pages);
    return ((page * dims->kv_heads + kv_head) * KV_PAGE + pos % KV_PAGE) * ATTENTION_DIM;
}

/* ---- append ------------------------------------------------------------------------------- */

struct append_work {
    const struct kv_append_args *args;
    float frequency[ATTENTION_ROTATED / 2];
};

static void attention_rope(float *x, const float *cosine, const float *sine)
{
    enum { HALF = ATTENTION_ROTATED / 2 };
    for (int i = 0; i < HALF; i += VF) {
        vf lo = vf_load(x + i), hi = vf_load(x + i + HALF);
        vf c = vf_load(cosine + i), s = vf_load(sine + i);
        vf_store(x + i, vf_sub(vf_mul(lo, c), vf_mul(hi, s)));
        vf_store(x + i + HALF, vf_fma(lo, s, vf_mul(hi, c)));
    }
}

static void attention_store(struct span pages, enum kv_kind kind, uint64_t at, const float *x)
{
    if (kind == KV_F32) {
        memcpy((float *)cpu_at(pages) + at, x, ATTENTION_DIM * sizeof *x);
        return;
    }
    uint16_t *to = (uint16_t *)cpu_at(pages) + at;
    for (int k = 0; k < ATTENTION_DIM; k += VF)
        vf_store_bf16(to + k, vf_load(x + k));
}

static const struct segment *attention_segment(const struct batch_view *batch, uint32_t row)
{
    const struct segment *s = batch->host_segments;
    while (row >= s->row + s->rows)
        s++;
    return s;
}

static void attention_append_row(void *arg, uint32_t row, int worker)
{
    (void)worker;
    struct append_work *work = arg;
    const struct kv_append_args *args = work->args;
    const struct attention_dims *dims = &args->dims;
    const struct segment *s = attention_segment(args->batch, row);
    uint32_t pos = s->pos + row - s->row;
    float cosine[ATTENTION_ROTATED / 2], sine[ATTENTION_ROTATED / 2];
    for (int i = 0; i < ATTENTION_ROTATED / 2; i++) {
        /* f32 angles, as the published model code has them; large ones need an exact reduction */
        double angle = (float)pos * work->frequency[i];
        cosine[i] = (float)cos(angle);
        sine[i] = (float)sin(angle);
    }
    const float *qg =
        (const float *)cpu_at(args->qg) + (size_t)row * dims->heads * 2 * ATTENTION_DIM;
    float *q = (float *)cpu_at(args->q) + (size_t)row * dims->heads * ATTENTION_DIM;
    for (uint32_t j = 0; j < dims->heads; j++, q += ATTENTION_DIM) {
        simd_rms_norm(qg + (size_t)j * 2 * ATTENTION_DIM, cpu_at(args->q_norm), ATTENTION_DIM,
                      dims->eps, q);
        attention_rope(q, cosine, sine);
    }
    for (uint32_t j = 0; j < dims->kv_heads; j++) {
        size_t from = ((size_t)row * dims->kv_heads + j) * ATTENTION_DIM;
        uint64_t at = attention_at(args->batch, dims, s->slot, pos, j);
        float k[ATTENTION_DIM];
        simd_rms_norm((const float *)cpu_at(args->k) + from, cpu_at(args->k_norm), ATTENTION_DIM,
                      dims->eps, k);
        attention_rope(k, cosine, sine);
        attention_store(args->k_pages, dims->kv_kind, at, k);
        attention_store(args->v_pages, dims->kv_kind, at, (const float *)cpu_at(args->v) + from);
    }
}

void LEVEL(kv_append)(struct device *device, const struct kv_append_args *args)
{
    struct append_work work = {.args = args};
    for (int i = 0; i < ATTENTION_ROTATED / 2; i++)
        work.frequency[i] = (float)pow(args->dims.rope_theta, -2.0 * i / ATTENTION_ROTATED);
    pool_run(device->pool, attention_append_row, &work, args->batch->rows);
}

/* ---- attention ---------------------------------------------------------------------------- */

/* Queries on their way over the positions; of one task. */
struct attention_part {
    float sum[ATTENTION_QUERIES][ATTENTION_DIM]; /* of exp(score - top) v */
    float top[ATTENTION_QUERIES], total[ATTENTION_QUERIES];
};

/* What a worker needs for a task and its tiles. */
struct attention_room {
    float q[ATTENTION_QUERIES][ATTENTION_DIM]; /* q / 16: the heads of the task's rows, in order */
    float k[ATTENTION_DIM][ATTENTION_STRIP];   /* a strip's; bf16 takes the first half */
    float score[ATTENTION_QUERIES][ATTENTION_TILE];
    float keep[ATTENTION_QUERIES];    /* exp(old top - new top): what the sums shrink by */
    struct attention_part part, page; /* all pages so far; the next one */
};

struct attention_task {
    uint32_t segment, kv_head;
    uint32_t head;      /* the first of its query heads */
    uint32_t row, rows; /* of the segment */
    uint32_t pos, end;  /* positions */
    uint32_t parts;     /* 1: the task finishes its rows; else the first of a split says how many */
};

struct attention_work {
    const struct attention_args *args;
    uint32_t group; /* query heads that share a KV head */
    uint32_t share; /* of which a task does so many */
    struct attention_task *task;
    struct attention_part *part; /* [tasks] where a task is split */
    uint64_t tasks;
    bool split;
    struct attention_room *room; /* [workers] */
};

/* Positions pos..pos+n-1 of a page, as the rows of a task meet them. */
struct attention_tile {
    const char *k, *v, *next; /* kv_kind [n, 256]; the next tile's keys, or these */
    uint32_t pos, n;
    uint32_t rows, share, row_pos; /* row_pos: position of the first of the rows */
};

/* Bytes from one position to the next. */
SIMD_INLINE size_t attention_bytes(enum kv_kind kind)
{
    return ATTENTION_DIM * (kind == KV_F32 ? sizeof(float) : sizeof(uint16_t));
}

/* Step i of a product asks for its part of what the next one reads: bf16 of a strip. */
SIMD_INLINE void attention_ask(const char *ahead, uint32_t i)
{
    __builtin_prefetch(ahead + (size_t)i * ATTENTION_STRIP * sizeof(uint16_t), 0, 2);
}

/* A strip of keys, [STRIP, 256], transposed: f32 to [256, STRIP], bf16 as it is in pairs of
 * dimensions to [128, STRIP]. */
SIMD_INLINE void attention_turn(enum kv_kind kind, const char *keys, float *out)
{
    int lanes = (int)(attention_bytes(kind) / sizeof(float));
    for (int half = 0; half < ATTENTION_STRIP; half += VF)
        for (int d = 0; d < lanes; d += VF) {
            vf x[VF];
            for (int i = 0; i < VF; i++)
                x[i] = vf_load_raw(keys + ((half + i) * lanes + d) * sizeof(float));
            vf_transpose(x);
            for (int i = 0; i < VF; i++)
                vf_store(out + (d + i) * ATTENTION_STRIP + half, x[i]);
        }
}

/* score[j][0..STRIP-1] = q[j] . keys of the strip, for n queries. */
SIMD_INLINE void attention_dots(int n, enum kv_kind kind, const float *k, const float *q,
                                float *score, const char *ahead)
{
    vf acc[ATTENTION_PACK][2];
    for (int j = 0; j < n; j++)
        acc[j][0] = acc[j][1] = vf_zero();
    for (int d = 0; d < ATTENTION_DIM; d += 2) {
        vf pair[2] = {vf_load(k), vf_load(k + VF)};
        k += ATTENTION_STRIP;
        for (int e = 0; e < 2; e++) {
            vf lo = pair[0], hi = pair[1];
            if (kind == KV_BF16) {
                lo = e ? vf_second_bf16(lo) : vf_first_bf16(lo);
                hi = e ? vf_second_bf16(hi) : vf_first_bf16(hi);
            } else if (e) {
                lo = vf_load(k);
                hi = vf_load(k + VF);
                k += ATTENTION_STRIP;
            }
            attention_ask(ahead, d + e);
            for (int j = 0; j < n; j++) {
                vf x = vf_set(q[j * ATTENTION_DIM + d + e]);
                acc[j][0] = vf_fma(x, lo, acc[j][0]);
                acc[j][1] = vf_fma(x, hi, acc[j][1]);
            }
        }
    }
    for (int j = 0; j < n; j++) {
        vf_store(score + j * ATTENTION_TILE, acc[j][0]);
        vf_store(score + j * ATTENTION_TILE + VF, acc[j][1]);
    }
}

/* sum[j] = keep[j] * sum[j] + weight[j] . values of a strip of dimensions, for n queries. Of bf16,
 * the strip's even dimensions come first. */
SIMD_INLINE void attention_add(int n, enum kv_kind kind, const char *v, uint32_t positions,
                               const float *weight, const float *keep, float *sum,
                               const char *ahead)
{
    vf acc[ATTENTION_PACK][2];
    for (int j = 0; j < n; j++)
        for (int h = 0; h < 2; h++)
            acc[j][h] = vf_mul(vf_set(keep[j]), vf_load(sum + j * ATTENTION_DIM + h * VF));
    for (uint32_t i = 0; i < positions; i++, v += attention_bytes(kind)) {
        vf lo = vf_load_raw(v), hi = lo;
        if (kind == KV_BF16) {
            lo = vf_first_bf16(lo);
            hi = vf_second_bf16(hi);
        } else {
            hi = vf_load_raw(v + sizeof(vf));
        }
        attention_ask(ahead, i);
        for (int j = 0; j < n; j++) {
            vf x = vf_set(weight[j * ATTENTION_TILE + i]);
            acc[j][0] = vf_fma(x, lo, acc[j][0]);
            acc[j][1] = vf_fma(x, hi, acc[j][1]);
        }
    }
    for (int j = 0; j < n; j++)
        for (int h = 0; h < 2; h++)
            vf_store(sum + j * ATTENTION_DIM + h * VF, acc[j][h]);
}

/* Scores of one query, of which the first n count, become weights relative to the running top.
 * Returns what the sums so far shrink by. */
static float attention_weights(float *score, uint32_t n, float *top, float *total)
{
    if (n == 0)
        return 1;
    for (uint32_t i = n; i < ATTENTION_TILE; i++)
        score[i] = -INFINITY;
    vf high = vf_set(*top), sum = vf_zero();
    for (int i = 0; i < ATTENTION_TILE; i += VF)
        high = vf_max(vf_load(score + i), high); /* a NaN is left to the sum */
    float best = vf_top(high), keep = best > *top ? expf(*top - best) : 1;
    for (int i = 0; i < ATTENTION_TILE; i += VF) {
        vf e = vf_exp(vf_sub(vf_load(score + i), vf_set(best)));
        vf_store(score + i, e);
        sum = vf_add(sum, e);
    }
    *total = *total * keep + vf_sum(sum);
    *top = best;
    return keep;
}

/* Positions of the tile that a row may read. */
static uint32_t attention_seen(const struct attention_tile *tile, uint32_t row)
{
    uint32_t end = tile->row_pos + row + 1;
    return end <= tile->pos ? 0 : end - tile->pos < tile->n ? end - tile->pos : tile->n;
}

/* Scores of a strip from position p of the tile on. */
SIMD_INLINE void attention_scores(enum kv_kind kind, const struct attention_tile *tile, uint32_t p,
                                  struct attention_room *room)
{
    enum { PACK = ATTENTION_PACK };
    const char *ahead = tile->v + p * attention_bytes(kind);
    attention_turn(kind, tile->k + p * attention_bytes(kind), &room->k[0][0]);
    for (uint32_t row = 0; row < tile->rows; row++) {
        uint32_t i = row * tile->share, end = i + tile->share;
        if (attention_seen(tile, row) <= p)
            continue;
        for (; end - i >= PACK; i += PACK)
            attention_dots(PACK, kind, room->k[0], room->q[i], &room->score[i][p], ahead);
        for (; end - i >= PACK / 2; i += PACK / 2)
            attention_dots(PACK / 2, kind, room->k[0], room->q[i], &room->score[i][p], ahead);
        for (; i < end; i++)
            attention_dots(1, kind, room->k[0], room->q[i], &room->score[i][p], ahead);
    }
}

/* Adds the values of a strip from dimension d on. A row's sums stop at its own position: what lies
 * behind may be no number. */
SIMD_INLINE void attention_values(enum kv_kind kind, const struct attention_tile *tile, uint32_t d,
                                  struct attention_room *room, struct attention_part *part)
{
    enum { PACK = ATTENTION_PACK };
    const char *v = tile->v + d * (attention_bytes(kind) / ATTENTION_DIM);
    const char *ahead = tile->next + (size_t)d * ATTENTION_TILE * sizeof(uint16_t);
    for (uint32_t row = 0; row < tile->rows; row++) {
        uint32_t seen = attention_seen(tile, row), i = row * tile->share, end = i + tile->share;
        for (; end - i >= PACK; i += PACK)
            attention_add(PACK, kind, v, seen, room->score[i], &room->keep[i], &part->sum[i][d],
                          ahead);
        for (; end - i >= PACK / 2; i += PACK / 2)
            attention_add(PACK / 2, kind, v, seen, room->score[i], &room->keep[i], &part->sum[i][d],
                          ahead);
        for (; i < end; i++)
            attention_add(1, kind, v, seen, room->score[i], &room->keep[i], &part->sum[i][d],
                          ahead);
    }
}

SIMD_INLINE void attention_tile_of(enum kv_kind kind, const struct attention_tile *tile,
                                   struct attention_room *room, struct attention_part *part)
{
    for (uint32_t p = 0; p < tile->n; p += ATTENTION_STRIP)
        attention_scores(kind, tile, p, room);
    for (uint32_t i = 0; i < tile->rows * tile->share; i++) /* one that sees nothing is kept */
        room->keep[i] = attention_weights(room->score[i], attention_seen(tile, i / tile->share),
                                          &part->top[i], &part->total[i]);
    for (uint32_t d = 0; d < ATTENTION_DIM; d += ATTENTION_STRIP)
        attention_values(kind, tile, d, room, part);
}

/* Up to 64 positions from pos on, all of one page, for all queries of a task. */
static void attention_tile(const struct attention_work *work, const struct attention_task *task,
                           uint32_t pos, uint32_t n, struct attention_room *room,
                           struct attention_part *part)
{
    const struct attention_args *args = work->args;
    const struct attention_dims *dims = &args->dims;
    const struct segment *s = &args->batch->host_segments[task->segment];
    size_t item = attention_bytes(dims->kv_kind) / ATTENTION_DIM;
    uint32_t after = pos + n < s->pos + s->rows ? pos + n : pos;
    uint64_t at = attention_at(args->batch, dims, s->slot, pos, task->kv_head);
    uint64_t next = attention_at(args->batch, dims, s->slot, after, task->kv_head);
    struct attention_tile tile = {.k = (const char *)cpu_at(args->k_pages) + at * item,
                                  .v = (const char *)cpu_at(args->v_pages) + at * item,
                                  .next = (const char *)cpu_at(args->k_pages) + next * item,
                                  .pos = pos,
                                  .n = n,
                                  .rows = task->rows,
                                  .share = work->share,
                                  .row_pos = s->pos + task->row};
    if (dims->kv_kind == KV_F32)
        attention_tile_of(KV_F32, &tile, room, part);
    else
        attention_tile_of(KV_BF16, &tile, room, part);
}

/* The task's queries, together and scaled. */
static void attention_load_queries(const struct attention_work *work,
                                   const struct attention_task *task, struct attention_room *room)
{
    const struct attention_args *args = work->args;
    const struct segment *s = &args->batch->host_segments[task->segment];
    for (uint32_t row = 0; row < task->rows; row++) {
        size_t head = (size_t)(s->row + task->row + row) * args->dims.heads + task->head;
        const float *q = (const float *)cpu_at(args->q) + head * ATTENTION_DIM;
        float *to = room->q[row * work->share];
        for (uint32_t k = 0; k < work->share * ATTENTION_DIM; k += VF)
            vf_store(to + k, vf_mul(vf_load(q + k), vf_set(1.0f / 16)));
    }
}

/* y = sum / total * sigmoid(gate) */
static void attention_finish(const struct attention_work *work, const struct attention_task *task,
                             const struct attention_part *part)
{
    const struct attention_args *args = work->args;
    const struct segment *s = &args->batch->host_segments[task->segment];
    for (uint32_t i = 0; i < task->rows * work->share; i++) {
        size_t head = (size_t)(s->row + task->row + i / work->share) * args->dims.heads +
                      task->head + i % work->share;
        const float *gate = (const float *)cpu_at(args->qg) + (head * 2 + 1) * ATTENTION_DIM;
        float *y = (float *)cpu_at(args->y) + head * ATTENTION_DIM;
        vf scale = vf_set(1 / part->total[i]);
        for (int d = 0; d < ATTENTION_DIM; d += ATTENTION_STRIP) {
            vf x[2] = {vf_load(part->sum[i] + d), vf_load(part->sum[i] + d + VF)};
            if (args->dims.kv_kind == KV_BF16)
                vf_zip(x);
            for (int h = 0; h < 2; h++)
                vf_store(y + d + h * VF,
                         vf_mul(vf_mul(x[h], scale), vf_sigmoid(vf_load(gate + d + h * VF))));
        }
    }
}

/* Positions pos..end-1, all of one page. */
static void attention_page(const struct attention_work *work, const struct attention_task *task,
                           uint32_t pos, uint32_t end, struct attention_room *room,
                           struct attention_part *part)
{
    uint32_t queries = task->rows * work->share;
    memset(part->sum, 0, queries * sizeof part->sum[0]);
    for (uint32_t i = 0; i < queries; i++) {
        part->top[i] = -1e30f; /* finite: -inf - -inf would be a NaN */
        part->total[i] = 0;
    }
    for (; pos < end; pos += ATTENTION_TILE)
        attention_tile(work, task, pos, end - pos < ATTENTION_TILE ? end - pos : ATTENTION_TILE,
                       room, part);
}

/* Adds the next page's part. One that a query sees nothing of leaves it as it is, to the bit. */
static void attention_join(struct attention_part *into, const struct attention_part *from,
                           uint32_t queries)
{
    for (uint32_t i = 0; i < queries; i++) {
        float top = into->top[i] > from->top[i] ? into->top[i] : from->top[i];
        float a = expf(into->top[i] - top), b = expf(from->top[i] - top);
        into->top[i] = top;
        into->total[i] = into->total[i] * a + from->total[i] * b;
        for (int d = 0; d < ATTENTION_DIM; d += VF)
            vf_store(into->sum[i] + d, vf_fma(vf_load(from->sum[i] + d), vf_set(b),
                                              vf_mul(vf_load(into->sum[i] + d), vf_set(a))));
    }
}

static void attention_run(void *arg, uint32_t index, int worker)
{
    struct attention_work *work = arg;
    const struct attention_task *task = &work->task[index];
    struct attention_room *room = &work->room[worker];
    attention_load_queries(work, task, room);
    if (task->parts != 1) {
        attention_page(work, task, task->pos, task->end, room, &work->part[index]);
        return;
    }
    for (uint32_t pos = 0; pos < task->end; pos += KV_PAGE) {
        uint32_t end = task->end - pos < KV_PAGE ? task->end : pos + KV_PAGE;
        attention_page(work, task, pos, end, room, pos ? &room->page : &room->part);
        if (pos)
            attention_join(&room->part, &room->page, task->rows * work->share);
    }
    attention_finish(work, task, &room->part);
}

/* Joins the parts of a split into the first of them. */
static void attention_gather(void *arg, uint32_t index, int worker)
{
    (void)worker;
    struct attention_work *work = arg;
    const struct attention_task *task = &work->task[index];
    if (task->parts <= 1)
        return;
    for (uint32_t p = 1; p < task->parts; p++)
        attention_join(&work->part[index], &work->part[index + p], task->rows * work->share);
    attention_finish(work, task, &work->part[index]);
}

/* Rows of one segment that a task takes. */
static uint32_t attention_rows_a_task(uint32_t group)
{
    return ATTENTION_QUERIES / group ? ATTENTION_QUERIES / group : 1;
}

/* Counts the tasks, and writes them where `task` is not null. */
static uint64_t attention_plan(const struct attention_work *work, struct attention_task *task)
{
    const struct batch_view *batch = work->args->batch;
    uint64_t n = 0;
    uint32_t step = attention_rows_a_task(work->group);
    for (uint32_t i = 0; i < batch->segments; i++) {
        const struct segment *s = &batch->host_segments[i];
        for (uint32_t head = 0; head < work->args->dims.heads; head += work->share)
            for (uint32_t r = 0; r < s->rows; r += step) {
                uint32_t rows = s->rows - r < step ? s->rows - r : step;
                uint32_t end = s->pos + r + rows, parts = (end + KV_PAGE - 1) / KV_PAGE;
                if (s->rows > ATTENTION_FEW_ROWS)
                    parts = 1;
                for (uint32_t p = 0; task && p < parts; p++)
                    task[n + p] = (struct attention_task){
                        .segment = i,
                        .kv_head = head / work->group,
                        .head = head,
                        .row = r,
                        .rows = rows,
                        .pos = p * KV_PAGE,
                        .end = p + 1 < parts ? (p + 1) * KV_PAGE : end,
                        .parts = p == 0 ? parts : 0,
                    };
                n += parts;
            }
    }
    return n;
}

/* How the work is cut for this device. */
static struct attention_work attention_share(const struct device *device,
                                             const struct attention_args *args)
{
    struct attention_work work = {.args = args, .group = args->dims.heads / args->dims.kv_heads};
    assert(work.group <= ATTENTION_QUERIES);
    work.share = work.group;
    work.tasks = attention_plan(&work, NULL);
    /* Fewer heads a task widen the keys and values more than once: only where threads are idle. */
    while (work.tasks < (uint32_t)device->threads && work.share % 4 == 0) {
        work.share /= 2;
        work.tasks = attention_plan(&work, NULL);
    }
    for (uint32_t i = 0; i < args->batch->segments; i++) {
        const struct segment *s = &args->batch->host_segments[i];
        work.split |= s->rows <= ATTENTION_FEW_ROWS && s->pos + s->rows > KV_PAGE;
    }
    return work;
}

uint64_t LEVEL(attention_scratch)(const struct device *device, const struct attention_dims *dims,
                                  const struct batch_view *batch)
{
    const struct attention_args args = {.batch = batch, .dims = *dims};
    struct attention_work work = attention_share(device, &args);
    return (uint64_t)device->threads * sizeof *work.room +
           work.tasks * (sizeof *work.task + (work.split ? sizeof *work.part : 0));
}

void LEVEL(attention)(struct device *device, const struct attention_args *args)
{
    struct attention_work work = attention_share(device, args);
    work.task = cpu_scratch(device, 0, work.tasks, sizeof *work.task);
    work.room = cpu_scratch(device, 1, (size_t)device->threads, sizeof *work.room);
    work.part = work.split ? cpu_scratch(device, 2, work.tasks, sizeof *work.part) : NULL;
    if (!work.task || !work.room || (work.split && !work.part))
        return;
    attention_plan(&work, work.task);
    pool_run(device->pool, attention_run, &work, (uint32_t)work.tasks);
    if (work.split)
        pool_run(device->pool, attention_gather, &work, (uint32_t)work.tasks);
}
