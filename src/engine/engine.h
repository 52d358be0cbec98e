/* The narrow waist: everything above (commands, server) uses the engine through this header. */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "base/err.h"
#include "engine/sampler.h"
#include "model/graph.h"
#include "text/grammar.h"
#include "text/tokenizer.h"

struct engine_options {
    const char *model;     /* folder */
    const char *backend;   /* null: the best one */
    int threads;           /* 0: one a core */
    uint32_t ctx;          /* positions; 0: the model's own, at most what fits */
    uint32_t chunk;        /* prefill rows a step; 0: what suits the device */
    uint32_t parallel;     /* sequences at a time; 0: 1 */
    uint64_t memory_bytes; /* it may use at most so much; 0: what is free */
    bool lock, huge_pages;
    bool deterministic;  /* see struct device_options */
    const char *without; /* likewise */
    enum { ENGINE_KV_AUTO, ENGINE_KV_F32, ENGINE_KV_BF16 } kv;
    void (*progress)(void *user, uint64_t done, uint64_t total);
    void *progress_user;
};

/* Of the keys and values: what is asked for, or what the device prefers. */
enum kv_kind engine_kv_kind(const struct engine_options *options, const struct device *device);

struct engine; /* model, device, state, graph, tokenizer; one thread uses it at a time */

/* Opens all of it, or fails and leaves nothing. What does not fit is refused before the weights are
 * read: ERR_RESOURCE, with the sizes and the largest context that fits. A tokenizer may be missing
 * (fixtures have none), a damaged one is an error. */
bool engine_open(const struct engine_options *options, struct engine **out, struct err *err);
void engine_close(struct engine *engine);

const struct model *engine_model(const struct engine *engine);
/* Null: the folder has none. */
const struct tokenizer *engine_tokenizer(const struct engine *engine);
const char *engine_backend(const struct engine *engine);
uint32_t engine_ctx(const struct engine *engine);
uint32_t engine_chunk(const struct engine *engine);

/* Sampling defaults of generation_config.json (greedy when it says so or is absent). */
struct sampler_options engine_sampling(const struct engine *engine);
/* Whether answers begin with a thought, unless told: also of generation_config.json. */
bool engine_thinks(const struct engine *engine);

enum finish { FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED };

struct engine_token {
    int32_t id;
    float logprob;                       /* when logprobs were asked for */
    const struct sampler_candidate *top; /* [top_count] */
    size_t top_count;
    const char *text; /* what became certain with this token; may be empty */
    size_t len;
};

struct engine_request {
    const int32_t *prompt; /* [prompt_len] */
    size_t prompt_len;
    uint32_t max_tokens; /* 0: until the context ends */
    struct sampler_options sampling;
    const char *const *stop; /* [stop_count] stop strings, not part of the answer; in an open
                              * thought they do not count */
    size_t stop_count;
    bool ignore_eos;
    bool logprobs;
    uint32_t top_logprobs;
    bool show_special; /* special tokens appear in the text (run --raw) */
    /* Prompt lengths at which the prefix cache keeps the recurrent states, besides its own: the end
     * of the system and tools block, and where the generation prompt begins. 0: none; with neither,
     * all of the prompt but its last token is kept. */
    uint32_t keep_at[2];
    bool thinking_open;    /* the prompt ends inside a think block */
    uint32_t think_tokens; /* with thinking_open: that many tokens, then "</think>" is forced;
                              * 0: no limit */
    const struct grammar *grammar; /* what the answer must look like, once thinking has ended, or
                                    * null; alive until the request has ended */
    /* Called for each token (text may lag by what is held back), and once more with id -1 for
     * the held rest. Returning false cancels. */
    bool (*on_token)(void *user, const struct engine_token *token);
    /* Called after each chunk of the prompt, or null. Returning false cancels. */
    bool (*on_prefill)(void *user, uint32_t done, uint32_t total);
    void *user;
};

struct engine_result {
    enum finish finish;
    int32_t stop_id;       /* the stop token, or -1 */
    struct token_list ids; /* generated, without the stop token; token_list_free */
    uint32_t prompt_tokens, cached_tokens;
    double prefill_s, decode_s, first_token_s;
};

/* Runs one request to its end, on a scheduler of its own; not beside another one's steps. What
 * earlier requests left is reused where the prompt begins alike (engine/cache.h). After a failure
 * the result holds nothing and the engine is usable. */
bool engine_generate(struct engine *engine, const struct engine_request *request,
                     struct engine_result *result, struct err *err);

/* Logits of every position of ids (for eval): calls `on_row` with row i, f32 [vocab] logits that
 * follow ids[0..i]; false from it ends the call early, without an error. `chunk` rows a step, at
 * most the engine's own; 0: the engine's own. */
bool engine_score(struct engine *engine, const int32_t *ids, size_t n, uint32_t chunk,
                  bool (*on_row)(void *user, size_t i, const float *logits), void *user,
                  struct err *err);

#endif
