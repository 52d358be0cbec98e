/* Attention for the fast levels: norm, rotation and append; then softmax over the pages in tiles.
 *
 * Query heads that share a KV head are done together, so a tile of keys and values is read, and
 * widened from bf16, once for all of them. A running maximum and sum (the online softmax) carry
 * each query over the tiles.
 * Prompts: a task is one KV head and a few rows, over all their positions.
 * Decoding: a task is one KV head and one page; a second pass joins the pages' partial results in
 * order, so the outcome does not depend on how many workers there are. */
#include "backend/cpu/fast.h"
#include "base/pool.h"

#include <assert.h>
#include <math.h>

enum {
    ATTENTION_DIM = 256,
    ATTENTION_ROTATED = 64,
    ATTENTION_TILE = 64,    /* positions; a page is a whole number of tiles */
    ATTENTION_QUERIES = 64, /* of a task: rows x heads that share a KV head */
    ATTENTION_FEW_ROWS = 4, /* segments up to here are split by pages */
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

/* What a worker needs for a tile. */
struct attention_room {
    float k[ATTENTION_TILE][ATTENTION_DIM], v[ATTENTION_TILE][ATTENTION_DIM];
    float score[ATTENTION_QUERIES][ATTENTION_TILE];
    struct attention_part part;
};

struct attention_task {
    uint32_t segment, kv_head;
    uint32_t row, rows; /* of the segment */
    uint32_t pos, end;  /* positions */
    uint32_t parts;     /* 1: the task finishes its rows; else the first of a split says how many */
};

struct attention_work {
    const struct attention_args *args;
    uint32_t group; /* query heads that share a KV head */
    struct attention_task *task;
    struct attention_part *part; /* [tasks]; null when no task is split */
    uint32_t tasks;
    struct attention_room *room; /* [workers] */
};

/* f32 [n, 256] of n positions: in place when the pages hold f32, else widened into `out`. */
static const float *attention_load(struct span pages, enum kv_kind kind, uint64_t at, uint32_t n,
                                   float *out)
{
    if (kind == KV_F32)
        return (const float *)cpu_at(pages) + at;
    const uint16_t *from = (const uint16_t *)cpu_at(pages) + at;
    for (size_t k = 0; k < (size_t)n * ATTENTION_DIM; k += VF)
        vf_store(out + k, vf_load_bf16(from + k));
    return out;
}

/* score[i] = q . k[i] / 16 for four positions and two queries at a time. */
SIMD_INLINE void attention_dots(const float *k, uint32_t n, const float *a, const float *b,
                                float *score_a, float *score_b)
{
    for (uint32_t i = 0; i < n; i += 4) {
        vf acc[2][4];
        const float *key[4];
        for (uint32_t j = 0; j < 4; j++) {
            key[j] = k + (size_t)(i + j < n ? i + j : n - 1) * ATTENTION_DIM;
            acc[0][j] = acc[1][j] = vf_zero();
        }
        for (int d = 0; d < ATTENTION_DIM; d += VF) {
            vf x = vf_load(a + d), y = vf_load(b + d);
            for (int j = 0; j < 4; j++) {
                vf v = vf_load(key[j] + d);
                acc[0][j] = vf_fma(v, x, acc[0][j]);
                acc[1][j] = vf_fma(v, y, acc[1][j]);
            }
        }
        for (uint32_t j = 0; j < 4; j++) {
            score_a[i + j] = vf_sum(acc[0][j]) * (1.0f / 16);
            score_b[i + j] = vf_sum(acc[1][j]) * (1.0f / 16);
        }
    }
}

/* Scores of one query, of which the first n count, become weights relative to the running top. */
static float attention_weights(float *score, uint32_t n, float *top, float *total)
{
    float best = *top;
    for (uint32_t i = 0; i < n; i++)
        best = score[i] > best ? score[i] : best;
    for (uint32_t i = n; i < ATTENTION_TILE; i++)
        score[i] = -INFINITY;
    vf sum = vf_zero();
    for (int i = 0; i < ATTENTION_TILE; i += VF) {
        vf e = vf_exp(vf_sub(vf_load(score + i), vf_set(best)));
        vf_store(score + i, e);
        sum = vf_add(sum, e);
    }
    for (uint32_t i = n; i < ATTENTION_TILE; i++)
        score[i] = 0;
    float keep = expf(*top - best);
    *total = *total * keep + vf_sum(sum);
    *top = best;
    return keep;
}

/* sum = keep * sum + weights . v for two queries (which may be the same one) and n positions. */
SIMD_INLINE void attention_add(const float *v, uint32_t n, const float *wa, const float *wb,
                               float keep_a, float keep_b, float *sum_a, float *sum_b)
{
    for (int d = 0; d < ATTENTION_DIM; d += 4 * VF) {
        vf a[4], b[4];
        for (int j = 0; j < 4; j++) {
            a[j] = vf_mul(vf_set(keep_a), vf_load(sum_a + d + j * VF));
            b[j] = vf_mul(vf_set(keep_b), vf_load(sum_b + d + j * VF));
        }
        for (uint32_t i = 0; i < n; i++) {
            vf x = vf_set(wa[i]), y = vf_set(wb[i]);
            for (int j = 0; j < 4; j++) {
                vf value = vf_load(v + (size_t)i * ATTENTION_DIM + d + j * VF);
                a[j] = vf_fma(x, value, a[j]);
                b[j] = vf_fma(y, value, b[j]);
            }
        }
        for (int j = 0; j < 4; j++) {
            vf_store(sum_b + d + j * VF, b[j]);
            vf_store(sum_a + d + j * VF, a[j]);
        }
    }
}

/* One tile of positions for all queries of a task. */
static void attention_tile(const struct attention_work *work, const struct attention_task *task,
                           uint32_t pos, uint32_t n, struct attention_room *room,
                           struct attention_part *part)
{
    const struct attention_args *args = work->args;
    const struct segment *s = &args->batch->host_segments[task->segment];
    uint64_t at = attention_at(args->batch, &args->dims, s->slot, pos, task->kv_head);
    const float *k = attention_load(args->k_pages, args->dims.kv_kind, at, n, &room->k[0][0]);
    const float *v = attention_load(args->v_pages, args->dims.kv_kind, at, n, &room->v[0][0]);
    const float *q = cpu_at(args->q);
    uint32_t group = work->group, queries = task->rows * group;
    for (uint32_t i = 0; i < queries; i += 2) {
        uint32_t pair[2] = {i, i + 1 < queries ? i + 1 : i}, seen[2];
        const float *query[2];
        float keep[2];
        for (int j = 0; j < 2; j++) {
            uint32_t row = task->row + pair[j] / group, last = s->pos + row;
            size_t head =
                (size_t)(s->row + row) * args->dims.heads + task->kv_head * group + pair[j] % group;
            query[j] = q + head * ATTENTION_DIM;
            seen[j] = last < pos ? 0 : last - pos + 1 < n ? last - pos + 1 : n;
        }
        if (seen[1] == 0)
            continue;
        attention_dots(k, seen[1], query[0], query[1], room->score[pair[0]], room->score[pair[1]]);
        keep[0] = keep[1] = 1;
        for (int j = 0; j < 2; j++) /* a query that sees nothing here keeps what it has */
            if (pair[j] == i + (uint32_t)j)
                keep[j] = attention_weights(room->score[pair[j]], seen[j], &part->top[pair[j]],
                                            &part->total[pair[j]]);
        if (pair[1] == pair[0])
            keep[1] = keep[0];
        attention_add(v, seen[1], room->score[pair[0]], room->score[pair[1]], keep[0], keep[1],
                      part->sum[pair[0]], part->sum[pair[1]]);
    }
}

/* y = sum / total * sigmoid(gate) */
static void attention_finish(const struct attention_work *work, const struct attention_task *task,
                             const struct attention_part *part)
{
    const struct attention_args *args = work->args;
    const struct segment *s = &args->batch->host_segments[task->segment];
    for (uint32_t i = 0; i < task->rows * work->group; i++) {
        size_t head = (size_t)(s->row + task->row + i / work->group) * args->dims.heads +
                      task->kv_head * work->group + i % work->group;
        const float *gate = (const float *)cpu_at(args->qg) + (head * 2 + 1) * ATTENTION_DIM;
        float *y = (float *)cpu_at(args->y) + head * ATTENTION_DIM;
        vf scale = vf_set(1 / part->total[i]);
        for (int d = 0; d < ATTENTION_DIM; d += VF)
            vf_store(y + d, vf_mul(vf_mul(vf_load(part->sum[i] + d), scale),
                                   vf_sigmoid(vf_load(gate + d))));
    }
}

static void attention_run(void *arg, uint32_t index, int worker)
{
    struct attention_work *work = arg;
    const struct attention_task *task = &work->task[index];
    struct attention_room *room = &work->room[worker];
    struct attention_part *part = task->parts == 1 ? &room->part : &work->part[index];
    uint32_t queries = task->rows * work->group;
    memset(part->sum, 0, queries * sizeof part->sum[0]);
    for (uint32_t i = 0; i < queries; i++) {
        part->top[i] = -1e30f; /* finite: -inf - -inf would be a NaN */
        part->total[i] = 0;
    }
    for (uint32_t pos = task->pos; pos < task->end; pos += ATTENTION_TILE)
        attention_tile(work, task, pos,
                       task->end - pos < ATTENTION_TILE ? task->end - pos : ATTENTION_TILE, room,
                       part);
    if (task->parts == 1)
        attention_finish(work, task, part);
}

/* Joins the parts of a split into the first of them. */
static void attention_join(void *arg, uint32_t index, int worker)
{
    (void)worker;
    struct attention_work *work = arg;
    const struct attention_task *task = &work->task[index];
    if (task->parts <= 1)
        return;
    struct attention_part *into = &work->part[index];
    for (uint32_t i = 0; i < task->rows * work->group; i++)
        for (uint32_t p = 1; p < task->parts; p++) {
            const struct attention_part *from = &work->part[index + p];
            float top = into->top[i] > from->top[i] ? into->top[i] : from->top[i];
            float a = expf(into->top[i] - top), b = expf(from->top[i] - top);
            into->top[i] = top;
            into->total[i] = into->total[i] * a + from->total[i] * b;
            for (int d = 0; d < ATTENTION_DIM; d += VF)
                vf_store(into->sum[i] + d, vf_fma(vf_load(from->sum[i] + d), vf_set(b),
                                                  vf_mul(vf_load(into->sum[i] + d), vf_set(a))));
        }
    attention_finish(work, task, into);
}

/* How rows of one segment are cut; by shapes only. */
static uint32_t attention_rows_a_task(uint32_t group)
{
    return ATTENTION_QUERIES / group ? ATTENTION_QUERIES / group : 1;
}

static uint32_t attention_plan(struct attention_work *work, struct attention_task *task)
{
    const struct batch_view *batch = work->args->batch;
    uint32_t n = 0, step = attention_rows_a_task(work->group);
    for (uint32_t i = 0; i < batch->segments; i++) {
        const struct segment *s = &batch->host_segments[i];
        for (uint32_t j = 0; j < work->args->dims.kv_heads; j++)
            for (uint32_t r = 0; r < s->rows; r += step) {
                uint32_t rows = s->rows - r < step ? s->rows - r : step;
                uint32_t end = s->pos + r + rows, parts = (end + KV_PAGE - 1) / KV_PAGE;
                if (s->rows > ATTENTION_FEW_ROWS)
                    parts = 1;
                for (uint32_t p = 0; p < parts; p++, n++)
                    if (task)
                        task[n] = (struct attention_task){
                            .segment = i,
                            .kv_head = j,
                            .row = r,
                            .rows = rows,
                            .pos = p * KV_PAGE,
                            .end = p + 1 < parts ? (p + 1) * KV_PAGE : end,
                            .parts = p == 0 ? parts : 0,
                        };
            }
    }
    return n;
}

void LEVEL(attention)(struct device *device, const struct attention_args *args)
{
    struct attention_work work = {.args = args, .group = args->dims.heads / args->dims.kv_heads};
    assert(work.group <= ATTENTION_QUERIES);
    work.tasks = attention_plan(&work, NULL);
    work.task = cpu_scratch(device, 0, work.tasks, sizeof *work.task);
    work.room = cpu_scratch(device, 1, (size_t)device->threads, sizeof *work.room);
    if (!work.task || !work.room)
        return;
    attention_plan(&work, work.task);
    bool split = false;
    for (uint32_t i = 0; i < work.tasks; i++)
        split |= work.task[i].parts != 1;
    if (split) {
        work.part = cpu_scratch(device, 2, work.tasks, sizeof *work.part);
        if (!work.part)
            return;
    }
    pool_run(device->pool, attention_run, &work, work.tasks);
    if (split)
        pool_run(device->pool, attention_join, &work, work.tasks);
}
