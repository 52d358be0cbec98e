/* A step: what makes the batch, what came of it. Who is admitted is in admit.c.
 *
 * A request gets a slot (with the deepest snapshot that fits its prompt), is read in chunks beside
 * the rows of those that already answer, then answers a row a step. While the same requests answer
 * greedily and nobody waits, the device gets the next step before the host has this one's tokens.
 *
 * Invariants: outside a step every running request's slot stands where its fed tokens end. A batch
 * that fails resets the slots in it, and its requests are read again one at a time and in smaller
 * chunks, so that the one at fault ends alone, and at its second failure alone at the latest. */
#include "engine/step.h"

#include "backend/device.h"
#include "base/clock.h"
#include "base/log.h"

#include <string.h>

enum {
    STEP_KEEP_ROWS = 4096,     /* at most so far from one snapshot to the next */
    STEP_LEAST_ROWS = 32,      /* prompt rows beside running streams, however slow they are */
    STEP_WORTH = 256,          /* tokens that another request must be about to share */
    STEP_LOAD_NS = 20000000,   /* a step's time to put in what the disk has given */
    STEP_SAVE_BYTES = 8 << 20, /* of pages that a step copies for the disk */
    STEP_RETRY = 4,            /* parts of a chunk in which a request that failed is read */
    STEP_WAIT_NS = 100000000,  /* to look at the disk again without its news */
};

/* What the prompt rows of a step may take while streams wait for it. */
static const double STEP_GAP_S = 0.1;

/* ---- ends --------------------------------------------------------------------------------- */

/* Under the lock. */
static void step_note_cache(struct scheduler *s)
{
    struct cache_stats cache = cache_read_stats(s->cache);
    s->stats.cache_bytes = cache.bytes;
    s->stats.cache_entries = cache.entries;
    s->stats.cache_hits = cache.hits;
    s->stats.cache_misses = cache.misses;
    s->stats.cache_evictions = cache.evictions;
    s->stats.disk_hits = cache.loads;
    s->stats.stored = cache.stored;
    s->stats.store_failed_size = cache.failed_size;
    s->stats.store_failed_memory = cache.failed_memory;
    s->stats.store_failed_disk = cache.failed_disk;
}

void step_end(struct scheduler *s, struct sequence *sequence, const struct err *err)
{
    struct engine_result *result = &sequence->result;
    bool failed = err->kind != ERR_NONE;
    if (sequence->load)
        cache_load_close(sequence->load, false);
    sequence->load = NULL;
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
    step_note_cache(s); /* who asks once the reply is there finds what it came to */
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
        if (!other || other == sequence || !other->start_ns ||
            (other->phase != SEQUENCE_PREFILL && other->phase != SEQUENCE_LOADING))
            continue;
        uint32_t most = sequence->prompt_len - 1, same = 0, best = 0;
        if (most > other->prompt_len)
            most = other->prompt_len;
        while (same < most && sequence->tokens.ids[same] == other->tokens.ids[same])
            same++;
        if (other->load && cache_load_length(other->load) <= same)
            best = cache_load_length(other->load);
        for (uint32_t at = step_next_keep(other, step_fed(s, other));
             !other->load && at <= same && at < other->prompt_len; at = step_next_keep(other, at))
            best = at;
        if (best >= have + STEP_WORTH)
            return true;
    }
    return false;
}

/* The request stands at a prefix of `have` tokens. */
static void step_note_begin(struct scheduler *s, struct sequence *sequence, uint32_t have)
{
    uint32_t cached = have < sequence->prompt_len ? have : sequence->prompt_len;
    if (!sequence->start_ns)
        sequence->start_ns = clock_now_ns();
    if (sequence->counted)
        return;
    sequence->counted = true;
    sequence->result.cached_tokens = cached;
    pthread_mutex_lock(&s->lock);
    s->stats.prompt_tokens += sequence->prompt_len;
    s->stats.cached_tokens += cached;
    pthread_mutex_unlock(&s->lock);
}

/* A request with a slot begins: from a snapshot where there is one. False: it waits. */
static bool step_begin(struct scheduler *s, struct sequence *sequence)
{
    uint32_t most = (uint32_t)sequence->tokens.len - 1;
    uint32_t have = cache_find(s->cache, sequence->tokens.ids, most);
    if (!sequence->suspect && step_should_wait(s, sequence, have))
        return false;
    if (!sequence->suspect && have < sequence->load_most)
        sequence->load =
            cache_load_open(s->cache, sequence->tokens.ids, sequence->load_most, sequence->slot);
    if (sequence->load) {
        sequence->phase = SEQUENCE_LOADING;
        sequence->start_ns = clock_now_ns();
        return false;
    }
    have = cache_restore(s->cache, sequence->tokens.ids, most, sequence->slot);
    step_note_begin(s, sequence, have);
    return true;
}

/* What the disk has given goes to the slots that wait for it. True: all that load wait for more. */
static bool step_load(struct scheduler *s)
{
    uint64_t until_ns = clock_now_ns() + STEP_LOAD_NS;
    bool waits = true;
    for (uint32_t i = 0; i < s->engine->parallel; i++) {
        struct sequence *sequence = s->running[i];
        if (!sequence || sequence->phase != SEQUENCE_LOADING)
            continue;
        uint32_t length = cache_load_length(sequence->load);
        enum cache_load_state state = cache_load_step(sequence->load, until_ns);
        waits &= state == CACHE_LOAD_WAITS;
        if (state != CACHE_LOAD_DONE && state != CACHE_LOAD_FAILED)
            continue;
        cache_load_close(sequence->load, state == CACHE_LOAD_DONE);
        sequence->load = NULL;
        sequence->phase = SEQUENCE_PREFILL;
        if (state == CACHE_LOAD_DONE)
            step_note_begin(s, sequence, length);
        else
            sequence->load_most = length - 1; /* a shorter one may be whole */
    }
    return waits;
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

/* Rows of a batch in which something runs that failed: what was too much for the device once is
 * tried in parts. */
static uint32_t step_retry_rows(const struct scheduler *s)
{
    return (s->engine->chunk + STEP_RETRY - 1) / STEP_RETRY;
}

/* Prompt rows that this step may have. */
static uint32_t step_budget(const struct scheduler *s)
{
    uint32_t chunk = s->engine->chunk, streaming = s->batch.rows, retry = step_retry_rows(s);
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i] && s->running[i]->failed)
            chunk = retry > streaming ? retry - streaming : 1;
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
    return sequence && sequence->phase != SEQUENCE_LOADING &&
           step_fed(s, sequence) + 1 < sequence->tokens.len;
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
        if (!sequence || sequence->suspect || sequence->phase == SEQUENCE_LOADING)
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
        uint32_t most = step_retry_rows(s);
        step_add(s, sequence, rows < most ? rows : most);
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
    step_add_readers(s, step_budget(s));
}

/* ---- what came of it ---------------------------------------------------------------------- */

static void step_count_fault(struct scheduler *s, bool fault)
{
    pthread_mutex_lock(&s->lock);
    s->stats.faults_in_a_row = fault ? s->stats.faults_in_a_row + 1 : 0;
    pthread_mutex_unlock(&s->lock);
}

/* The request is read again, alone, from what the cache has of it. */
static void step_redo(struct scheduler *s, struct sequence *sequence)
{
    state_reset(&s->engine->state, sequence->slot);
    sequence->suspect = true;
}

/* The batch as a whole failed: nobody's state can be trusted. */
static void step_fail_batch(struct scheduler *s, struct err *err)
{
    struct err after = {0};
    bool alone = s->batch.segments == 1;
    if (s->ahead) /* what followed it is worth nothing */
        graph_read_choices(s->engine->graph, s->choices, &after);
    s->ahead = false;
    log_warn("a batch of %u requests failed: %s", s->batch.segments, err->text);
    step_count_fault(s, true);
    for (uint32_t i = 0; i < s->batch.segments; i++) {
        struct sequence *sequence = s->member[i];
        if (!sequence)
            continue;
        if (alone && (sequence->suspect || sequence->failed_alone)) {
            step_end_fault(s, sequence, err);
            continue;
        }
        /* Who failed before goes past this place alone, so that it is not come to for ever. */
        sequence->suspect_to = sequence->failed ? s->segments[i].pos + s->segments[i].rows : 0;
        sequence->failed = true;
        sequence->failed_alone |= alone;
        step_redo(s, sequence);
    }
}

/* The answer ends: what the slot holds is where a next turn may go on. False: the step that follows
 * failed. That is asked before its state is read, since reading would take the error away. */
static bool step_finish(struct scheduler *s, struct sequence *sequence, struct err *err)
{
    struct device *device = s->engine->device;
    uint32_t fed = step_fed(s, sequence);
    bool keeps = sequence->result.finish != FINISH_CANCELLED && fed > sequence->prompt_len;
    bool good = !keeps || !s->ahead || device_calls(device)->sync(device, err);
    if (keeps && good)
        cache_store(s->cache, sequence->tokens.ids, fed, sequence->slot);
    step_end_well(s, sequence);
    return good;
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

/* The step that follows took the argmax for granted, and another token comes: this request leaves
 * that step, and its state is made again. */
static void step_leave_ahead(struct scheduler *s, uint32_t i)
{
    step_redo(s, s->asking[i]);
    s->asking[i] = s->member[i] = NULL;
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
        if (good && s->ahead && sequence_wants_logits(sequence, s->choices[i])) {
            step_leave_ahead(s, i);
            continue;
        }
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
            if (!step_finish(s, sequence, err))
                return false;
        } else if (s->ahead && sequence->tokens.ids[sequence->tokens.len - 1] != s->choices[i]) {
            step_leave_ahead(s, i);
        }
    }
    return true;
}

static void step_time(struct scheduler *s, double seconds)
{
    pthread_mutex_lock(&s->lock);
    s->stats.compute_s += seconds;
    pthread_mutex_unlock(&s->lock);
    if (s->batch.rows < STEP_LEAST_ROWS)
        return;
    double row_s = seconds / s->batch.rows;
    s->row_s = s->row_s > 0 ? 0.5 * (s->row_s + row_s) : row_s;
}

/* Whether the next batch will be this one again, a token on, as far as can be known before this
 * one's tokens are. */
static bool step_can_follow(struct scheduler *s)
{
    for (uint32_t i = 0; i < s->batch.segments; i++) {
        const struct sequence *sequence = s->member[i];
        if (!sequence || sequence->suspect || sequence->phase != SEQUENCE_DECODE ||
            !sequence_can_follow(sequence))
            return false;
    }
    pthread_mutex_lock(&s->lock);
    bool nobody_else = !s->queue && s->stats.running == s->batch.segments;
    pthread_mutex_unlock(&s->lock);
    return nobody_else;
}

/* Runs the batch; false: it failed, and err says how. */
static bool step_run_batch(struct scheduler *s, struct err *err)
{
    struct graph *graph = s->engine->graph;
    uint64_t start_ns = clock_now_ns();
    bool queued = s->ahead || graph_forward(graph, &s->batch, err);
    s->ahead = queued && step_can_follow(s) && graph_follow(graph);
    if (!queued || !graph_read_choices(graph, s->choices, err))
        return false;
    step_time(s, clock_seconds_since(start_ns));
    return true;
}

/* The batch ends. One that follows it has the same rows, a token on, less those that ended. */
static void step_end_batch(struct scheduler *s, bool good)
{
    bool anybody = false;
    for (uint32_t i = 0; i < s->batch.segments; i++) {
        s->segments[i].pos++;
        anybody |= s->member[i] != NULL;
        if (good && s->member[i])
            s->member[i]->suspect &=
                s->segments[i].pos + s->segments[i].rows <= s->member[i]->suspect_to;
    }
    s->ahead = s->ahead && anybody;
    if (!s->ahead)
        s->batch.segments = s->batch.logit_rows = 0;
}

static void step_settle(struct scheduler *s)
{
    for (uint32_t i = 0; i < s->batch.segments; i++) {
        struct sequence *sequence = s->member[i];
        if (!sequence)
            continue;
        if (!step_note_prefill(s, sequence, s->segments[i].pos))
            step_cancel(s, sequence);
    }
}

static bool step_is_loading(const struct scheduler *s)
{
    for (uint32_t i = 0; i < s->engine->parallel; i++)
        if (s->running[i] && s->running[i]->phase == SEQUENCE_LOADING)
            return true;
    return false;
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
    pthread_mutex_lock(&s->lock);
    s->stats.steps++;
    step_note_cache(s);
    pthread_mutex_unlock(&s->lock);
}

/* Nothing to do until the disk has news, or somebody comes or goes. */
static void step_wait(struct scheduler *s, uint64_t events)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += STEP_WAIT_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&s->lock);
    while (s->events == events && !s->closing)
        if (pthread_cond_timedwait(&s->wake, &s->lock, &until) != 0)
            break;
    pthread_mutex_unlock(&s->lock);
}

bool step_save(struct scheduler *s)
{
    return cache_save_some(s->cache, STEP_SAVE_BYTES);
}

bool scheduler_step(struct scheduler *s)
{
    struct err err = {0};
    pthread_mutex_lock(&s->lock);
    uint64_t events = s->events;
    pthread_mutex_unlock(&s->lock);
    admit_requests(s);
    bool waits = step_load(s);
    if (!s->ahead)
        step_form(s);
    if (s->batch.segments == 0 && step_is_loading(s)) {
        if (waits && !step_save(s))
            step_wait(s, events);
        return true;
    }
    if (s->batch.segments == 0)
        return step_is_starved(s);
    bool good = step_run_batch(s, &err);
    if (good) {
        step_settle(s);
        good = step_advance(s, &err);
    }
    if (!good)
        step_fail_batch(s, &err);
    step_end_batch(s, good);
    if (!s->ahead) /* it reads from the device, and would take the next step's error away */
        step_save(s);
    step_note_step(s);
    return true;
}
