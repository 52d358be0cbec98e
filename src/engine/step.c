/* A step: who is admitted, what makes the batch, what came of it.
 *
 * A request gets a slot (with the deepest snapshot that fits its prompt), is read in chunks beside
 * the rows of those that already answer, then answers a row a step.
 *
 * Invariants: outside a step every running request's slot stands where its fed tokens end. A batch
 * that fails resets the slots in it, and its requests are read again one at a time, so that the one
 * at fault ends alone. */
#include "engine/step.h"

#include "backend/device.h"
#include "base/clock.h"
#include "base/log.h"

#include <assert.h>
#include <string.h>

enum {
    STEP_KEEP_ROWS = 4096, /* at most so far from one snapshot to the next */
    STEP_LEAST_ROWS = 32,  /* prompt rows beside running streams, however slow they are */
    STEP_WORTH = 256,      /* tokens that another request must be about to share */
};

/* What the prompt rows of a step may take while streams wait for it. */
static const double STEP_GAP_S = 0.1;

/* ---- ends --------------------------------------------------------------------------------- */

void step_end(struct scheduler *s, struct sequence *sequence, const struct err *err)
{
    struct engine_result *result = &sequence->result;
    bool failed = err->kind != ERR_NONE;
    for (uint32_t i = 0; i < s->batch.segments; i++)
        s->member[i] = s->member[i] == sequence ? NULL : s->member[i];
    for (uint32_t i = 0; i < s->batch.logit_rows; i++)
        s->asking[i] = s->asking[i] == sequence ? NULL : s->asking[i];
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i] == sequence) {
            s->running[i] = NULL;
            s->stats.running--;
            state_release(&s->engine->state, sequence->slot);
        }
    s->stats.failed += failed;
    s->stats.cancelled += !failed && result->finish == FINISH_CANCELLED;
    s->stats.generated_tokens += result->ids.len;
    pthread_mutex_unlock(&s->lock);
    if (sequence->done)
        sequence->done(sequence->done_user, result, err);
    sequence_close(sequence);
}

static void step_end_well(struct scheduler *s, struct sequence *sequence)
{
    step_end(s, sequence, &(struct err){0});
}

void step_cancel(struct scheduler *s, struct sequence *sequence)
{
    sequence_stop(sequence);
    step_end_well(s, sequence);
}

/* A fault of this request: nothing that it read or left is trusted any more. */
static void step_end_fault(struct scheduler *s, struct sequence *sequence, const struct err *err)
{
    log_warn("request %llu ends: %s", (unsigned long long)sequence->id, err->text);
    cache_drop(s->cache, sequence->tokens.ids, (uint32_t)sequence->tokens.len);
    step_end(s, sequence, err);
}

/* ---- admission ----------------------------------------------------------------------------- */

/* Takes one cancelled request out of the queue, or null. */
static struct sequence *step_pop_cancelled(struct scheduler *s)
{
    struct sequence *found = NULL;
    pthread_mutex_lock(&s->lock);
    for (struct sequence **link = &s->queue; *link && !found; link = &(*link)->next)
        if (atomic_load(&(*link)->cancelled)) {
            found = *link;
            *link = found->next;
            if (!found->next)
                s->queue_end = link;
            s->stats.queued--;
            break;
        }
    pthread_mutex_unlock(&s->lock);
    return found;
}

/* Moves the head of the queue to a free slot; false when there is none of either. */
static bool step_admit_one(struct scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    struct sequence *sequence = s->queue;
    uint32_t i = 0;
    while (i < s->engine->parallel && s->running[i])
        i++;
    bool admits = sequence && i < s->engine->parallel &&
                  state_acquire(&s->engine->state, &sequence->slot, NULL);
    if (admits) {
        s->queue = sequence->next;
        if (!s->queue)
            s->queue_end = &s->queue;
        sequence->next = NULL;
        s->stats.queued--;
        s->stats.running++;
        s->running[i] = sequence;
        sequence->phase = SEQUENCE_PREFILL;
    }
    pthread_mutex_unlock(&s->lock);
    return admits;
}

static void step_admit(struct scheduler *s)
{
    struct sequence *cancelled;
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i] && atomic_load(&s->running[i]->cancelled)) {
            step_cancel(s, s->running[i]);
        }
    while ((cancelled = step_pop_cancelled(s))) {
        step_cancel(s, cancelled);
    }
    while (step_admit_one(s))
        ;
}

/* ---- snapshots ---------------------------------------------------------------------------- */

static uint32_t step_fed(const struct scheduler *s, const struct sequence *sequence)
{
    return s->engine->state.slot_pos[sequence->slot];
}

/* The first position after `pos` at which the prompt's state is to be kept; the prompt's length
 * when there is none before it. */
static uint32_t step_next_keep(const struct sequence *sequence, uint32_t pos)
{
    const uint32_t *keep_at = sequence->request.keep_at;
    uint32_t end = sequence->prompt_len, next = end;
    uint32_t want[] = {keep_at[0], keep_at[1], (pos / STEP_KEEP_ROWS + 1) * STEP_KEEP_ROWS,
                       keep_at[0] || keep_at[1] ? 0 : end - 1};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (want[i] > pos && want[i] < next)
            next = want[i];
    return next;
}

/* Whether another request is about to leave a snapshot that spares this one much reading. */
static bool step_should_wait(const struct scheduler *s, const struct sequence *sequence,
                             uint32_t have)
{
    for (uint32_t i = 0; i < s->engine->parallel; i++) {
        const struct sequence *other = s->running[i];
        if (!other || other == sequence || other->phase != SEQUENCE_PREFILL || !other->start_ns)
            continue;
        uint32_t most = sequence->prompt_len - 1, same = 0, best = 0;
        if (most > other->prompt_len)
            most = other->prompt_len;
        while (same < most && sequence->tokens.ids[same] == other->tokens.ids[same])
            same++;
        for (uint32_t at = step_next_keep(other, step_fed(s, other));
             at <= same && at < other->prompt_len; at = step_next_keep(other, at))
            best = at;
        if (best >= have + STEP_WORTH)
            return true;
    }
    return false;
}

/* A request with a slot begins: from a snapshot where there is one. False: it waits. */
static bool step_begin(struct scheduler *s, struct sequence *sequence)
{
    uint32_t most = (uint32_t)sequence->tokens.len - 1;
    uint32_t have = cache_find(s->cache, sequence->tokens.ids, most);
    if (!sequence->suspect && step_should_wait(s, sequence, have))
        return false;
    have = cache_restore(s->cache, sequence->tokens.ids, most, sequence->slot);
    if (!sequence->start_ns) {
        sequence->start_ns = clock_now_ns();
        sequence->result.cached_tokens = have < sequence->prompt_len ? have : sequence->prompt_len;
        pthread_mutex_lock(&s->lock);
        s->stats.prompt_tokens += sequence->prompt_len;
        s->stats.cached_tokens += sequence->result.cached_tokens;
        pthread_mutex_unlock(&s->lock);
    }
    return true;
}

/* ---- a batch ------------------------------------------------------------------------------ */

/* Adds `rows` tokens of a request to the batch, if the pool has the pages. */
static bool step_add(struct scheduler *s, struct sequence *sequence, uint32_t rows)
{
    struct state *state = &s->engine->state;
    struct batch *batch = &s->batch;
    uint32_t pos = step_fed(s, sequence), slot = sequence->slot;
    uint32_t wanted = (pos + rows + KV_PAGE - 1) / KV_PAGE - state->slot_pages[slot];
    struct err err = {0};
    /* Taken here, so that two requests do not count on the same free page. */
    if (!cache_make_room(s->cache, wanted) || !state_reserve(state, slot, rows, &err))
        return false;
    s->member[batch->segments] = sequence;
    s->segments[batch->segments++] =
        (struct segment){.slot = slot, .row = batch->rows, .rows = rows, .pos = pos};
    memcpy(s->tokens + batch->rows, sequence->tokens.ids + pos, rows * sizeof *s->tokens);
    batch->rows += rows;
    if (pos + rows == sequence->tokens.len) {
        s->asking[batch->logit_rows] = sequence;
        s->logit_row[batch->logit_rows++] = batch->rows - 1;
    }
    return true;
}

/* Prompt rows that this step may have. */
static uint32_t step_budget(const struct scheduler *s, bool streaming)
{
    uint32_t chunk = s->engine->chunk;
    if (!streaming)
        return chunk;
    uint32_t rows = s->prefill_rows;
    if (!rows)
        rows = s->row_s > 0 ? (uint32_t)(STEP_GAP_S / s->row_s) : 4 * STEP_LEAST_ROWS;
    if (!s->prefill_rows && rows < STEP_LEAST_ROWS)
        rows = STEP_LEAST_ROWS;
    return rows < chunk ? rows : chunk;
}

static bool step_reads(const struct scheduler *s, const struct sequence *sequence)
{
    return sequence && step_fed(s, sequence) + 1 < sequence->tokens.len;
}

/* Rows of every request that answers. */
static void step_add_streams(struct scheduler *s)
{
    for (uint32_t i = 0; i < s->engine->parallel; i++) {
        struct sequence *sequence = s->running[i];
        if (sequence && sequence->phase == SEQUENCE_DECODE && !sequence->suspect &&
            !step_reads(s, sequence))
            step_add(s, sequence, 1);
    }
}

/* Prompt rows: every reader gets an equal share of what is left, in turns, and no more than to its
 * next snapshot. */
static void step_add_readers(struct scheduler *s, uint32_t budget)
{
    uint32_t parallel = s->engine->parallel, readers = 0;
    for (uint32_t i = 0; i < parallel; i++)
        readers += step_reads(s, s->running[i]) || (s->running[i] && !s->running[i]->start_ns);
    s->turn = (s->turn + 1) % parallel;
    for (uint32_t n = 0; n < parallel && budget; n++) {
        struct sequence *sequence = s->running[(s->turn + n) % parallel];
        if (!sequence || sequence->suspect)
            continue;
        bool fresh = sequence->phase == SEQUENCE_PREFILL && step_fed(s, sequence) == 0;
        if (!fresh && sequence->phase == SEQUENCE_DECODE && !step_reads(s, sequence))
            continue;
        if (fresh && !step_begin(s, sequence)) {
            readers--;
            continue;
        }
        uint32_t pos = step_fed(s, sequence), share = budget / (readers ? readers : 1);
        uint32_t rows = (uint32_t)sequence->tokens.len - pos, keep = sequence->prompt_len;
        if (pos < keep)
            keep = step_next_keep(sequence, pos);
        if (pos < keep && rows > keep - pos)
            rows = keep - pos;
        share = share ? share : 1;
        rows = rows < share ? rows : share;
        if (step_add(s, sequence, rows))
            budget -= rows;
        readers -= readers > 0;
    }
}

/* A request whose last batch failed runs alone, from its beginning. */
static bool step_add_suspect(struct scheduler *s)
{
    for (uint32_t i = 0; i < s->engine->parallel; i++) {
        struct sequence *sequence = s->running[i];
        if (!sequence || !sequence->suspect)
            continue;
        if (step_fed(s, sequence) == 0)
            step_begin(s, sequence);
        uint32_t rows = (uint32_t)sequence->tokens.len - step_fed(s, sequence);
        step_add(s, sequence, rows < s->engine->chunk ? rows : s->engine->chunk);
        return true;
    }
    return false;
}

static void step_form(struct scheduler *s)
{
    s->batch =
        (struct batch){.tokens = s->tokens, .segment = s->segments, .logit_row = s->logit_row};
    if (step_add_suspect(s))
        return;
    step_add_streams(s);
    step_add_readers(s, step_budget(s, s->batch.rows > 0));
}

/* ---- what came of it ---------------------------------------------------------------------- */

static void step_count_fault(struct scheduler *s, bool fault)
{
    pthread_mutex_lock(&s->lock);
    s->stats.faults_in_a_row = fault ? s->stats.faults_in_a_row + 1 : 0;
    pthread_mutex_unlock(&s->lock);
}

/* The batch as a whole failed: nobody's state can be trusted. */
static void step_fail_batch(struct scheduler *s, struct err *err)
{
    bool alone = s->batch.segments == 1;
    log_warn("a batch of %u requests failed: %s", s->batch.segments, err->text);
    step_count_fault(s, true);
    for (uint32_t i = 0; i < s->batch.segments; i++) {
        struct sequence *sequence = s->member[i];
        if (!sequence)
            continue;
        state_reset(&s->engine->state, sequence->slot);
        if (alone && sequence->suspect)
            step_end_fault(s, sequence, err);
        else
            sequence->suspect = true;
    }
}

/* The answer ends: what the slot holds is where a next turn may go on. */
static void step_finish(struct scheduler *s, struct sequence *sequence)
{
    uint32_t fed = step_fed(s, sequence);
    if (sequence->result.finish != FINISH_CANCELLED && fed > sequence->prompt_len)
        cache_store(s->cache, sequence->tokens.ids, fed, sequence->slot);
    step_end_well(s, sequence);
}

/* The prompt has come so far; false when the caller wants no more. */
static bool step_note_prefill(struct scheduler *s, struct sequence *sequence, uint32_t pos)
{
    const struct engine_request *request = &sequence->request;
    uint32_t fed = step_fed(s, sequence), total = sequence->prompt_len;
    if (pos >= total || sequence->phase != SEQUENCE_PREFILL)
        return true;
    if (fed < total && step_next_keep(sequence, pos) == fed)
        cache_store(s->cache, sequence->tokens.ids, fed, sequence->slot);
    return !request->on_prefill || request->on_prefill(request->user, fed, total);
}

/* Every row that asked gets its next token. */
static bool step_advance(struct scheduler *s, struct err *err)
{
    struct engine *engine = s->engine;
    for (uint32_t i = 0; i < s->batch.logit_rows; i++) {
        struct sequence *sequence = s->asking[i];
        struct err own = {0};
        if (!sequence)
            continue;
        bool good = s->choices[i] >= 0;
        if (!good)
            err_set(&own, ERR_INTERNAL,
                    "the model's output is not a number; the weights are damaged, or this is a "
                    "fault of the '%s' backend: please report it",
                    device_head(engine->device)->name);
        else if (sequence_wants_logits(sequence, s->choices[i]) &&
                 !graph_read_logits(engine->graph, i, engine->logits, err))
            return false;
        good = good && sequence_advance(sequence, s->choices[i], engine->logits, &own);
        step_count_fault(s, !good);
        if (!good) {
            step_end_fault(s, sequence, &own);
        } else if (sequence->phase == SEQUENCE_ENDED) {
            step_finish(s, sequence);
        }
    }
    return true;
}

static void step_time(struct scheduler *s, uint64_t start_ns)
{
    if (s->batch.rows < STEP_LEAST_ROWS)
        return;
    double row_s = clock_seconds_since(start_ns) / s->batch.rows;
    s->row_s = s->row_s > 0 ? 0.5 * (s->row_s + row_s) : row_s;
}

/* Runs the batch; false: it failed, and err says how. */
static bool step_run_batch(struct scheduler *s, struct err *err)
{
    uint64_t start_ns = clock_now_ns();
    if (!graph_forward(s->engine->graph, &s->batch, err) ||
        !graph_read_choices(s->engine->graph, s->choices, err))
        return false;
    step_time(s, start_ns);
    return true;
}

static void step_settle(struct scheduler *s)
{
    for (uint32_t i = 0; i < s->batch.segments; i++) {
        struct sequence *sequence = s->member[i];
        sequence->suspect = false;
        if (step_note_prefill(s, sequence, s->segments[i].pos))
            continue;
        step_cancel(s, sequence);
    }
}

/* Something runs and nothing could be batched: the pool is smaller than its slots' contexts. */
static bool step_is_starved(struct scheduler *s)
{
    struct err err = {0};
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i]) {
            err_set(&err, ERR_RESOURCE, "no KV page is left for %zu tokens; use a smaller --ctx",
                    s->running[i]->tokens.len);
            step_end_fault(s, s->running[i], &err);
            return true;
        }
    return false;
}

static void step_note_step(struct scheduler *s)
{
    struct cache_stats cache = cache_read_stats(s->cache);
    struct disk_stats disk = {0};
    if (s->disk)
        disk = disk_read_stats(s->disk);
    pthread_mutex_lock(&s->lock);
    s->stats.steps++;
    s->stats.cache_bytes = cache.bytes;
    s->stats.cache_entries = cache.entries;
    s->stats.cache_hits = cache.hits;
    s->stats.cache_misses = cache.misses;
    s->stats.cache_evictions = cache.evictions;
    s->stats.store_failed = cache.store_failed + disk.failed;
    s->stats.disk_bytes = disk.bytes;
    s->stats.disk_entries = disk.entries;
    pthread_mutex_unlock(&s->lock);
}

bool scheduler_step(struct scheduler *s)
{
    struct err err = {0};
    step_admit(s);
    step_form(s);
    if (s->batch.segments == 0)
        return step_is_starved(s);
    bool good = step_run_batch(s, &err);
    if (good) {
        step_settle(s);
        good = step_advance(s, &err);
    }
    if (!good)
        step_fail_batch(s, &err);
    s->batch.segments = s->batch.logit_rows = 0;
    step_note_step(s);
    return true;
}
