/* One request on its way: what was asked, which tokens there are, and how a row of logits becomes
 * the next one. It knows no device and no other request. */
#ifndef ENGINE_SEQUENCE_H
#define ENGINE_SEQUENCE_H

#include "engine/core.h"
#include "engine/scheduler.h"
#include "engine/stops.h"

#include <stdatomic.h>

enum sequence_phase {
    SEQUENCE_QUEUED,
    SEQUENCE_LOADING, /* a prefix comes from disk */
    SEQUENCE_PREFILL,
    SEQUENCE_DECODE,
    SEQUENCE_ENDED,
};

struct sequence {
    /* what was asked; pointers of the request lead to memory of the sequence, except grammar */
    struct engine *engine;
    struct engine_request request; /* prompt is null: see tokens */
    struct token_list tokens;      /* the prompt, the answer, the token that ended it if any */
    uint32_t prompt_len;
    uint32_t limit; /* tokens to generate, at most */
    char *strings;  /* the stop strings' bytes */
    struct sampler_bias *bias;

    /* the answer */
    struct engine_result result;
    struct sampler *sampler;
    struct detokenizer detokenizer;
    struct stops stops;
    struct buf piece;              /* text of the newest token, before stops */
    struct buf text;               /* text that on_token will see next */
    struct sampler_candidate *top; /* [request.top_logprobs] */
    float *untouched;              /* f32 [vocab]: logits as the model gave them, for logprobs */
    struct grammar_run *grammar;   /* once the thought has ended, when the request has one */
    int32_t think_end;             /* id of "</think>", or -1 */
    bool thinking;                 /* inside the think block that the prompt opened */
    bool stops_at_once;            /* a stop string is one token: it comes without a beginning */
    uint64_t submit_ns, start_ns, first_ns; /* queued; prefill began; first token */

    /* the scheduler's */
    enum sequence_phase phase;
    uint64_t id;
    scheduler_done *done;
    void *done_user;
    atomic_bool cancelled;
    struct sequence *next;   /* in the queue */
    uint32_t slot;           /* while phase is LOADING, PREFILL or DECODE */
    struct cache_load *load; /* while phase is LOADING */
    uint32_t load_most;      /* tokens of a prefix from disk: longer ones did not hold */
    bool counted;            /* its prompt, in the scheduler's numbers */
    bool suspect;            /* its last batch failed: it runs alone until one is good */
    bool failed;             /* a batch with it did: prompts are read in smaller chunks beside it */
    bool failed_alone;       /* a batch of it alone did: at the next such it ends */
    uint32_t suspect_to;     /* position that a good batch must reach for it to run with others */
};

/* Checks the request and copies it: ERR_USAGE or ERR_RESOURCE, naming what is wrong. */
bool sequence_open(struct engine *engine, const struct engine_request *request,
                   struct sequence **out, struct err *err);
void sequence_close(struct sequence *sequence);

/* Whether sequence_advance needs the logits, or the argmax alone will do. By the thread that steps,
 * as sequence_advance. */
bool sequence_wants_logits(const struct sequence *sequence, int32_t argmax);

/* Whether the token after the next one can be worked on before the next one is known on the host:
 * all that is likely to follow is the argmax, and more than one token. */
bool sequence_can_follow(const struct sequence *sequence);

/* The logits after the last token are there: `argmax` of them, and the row itself, f32 [vocab]
 * (overwritten), when sequence_wants_logits. Chooses the next token, appends it to tokens and
 * result, hands text over; phase becomes ENDED when that was the last. False: a numerical fault. */
bool sequence_advance(struct sequence *sequence, int32_t argmax, float *logits, struct err *err);

/* Ends as cancelled. */
void sequence_stop(struct sequence *sequence);

#endif
