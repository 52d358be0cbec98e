/* One request that makes the model write: from its parsed body to its reply, for every API.
 *
 * An API reads the body into prompts and options, and writes what comes back; submitting, waiting,
 * taking the text apart and ending are the same for all. The engine's thread sees an answer only
 * through the callbacks in answer.c, which post to its mailbox. */
#ifndef SERVER_ANSWER_H
#define SERVER_ANSWER_H

#include "server/core.h"
#include "server/logprobs.h"
#include "server/mailbox.h"
#include "text/grammar.h"
#include "text/parser.h"

enum { ANSWER_MAX_STOPS = 16, ANSWER_MAX_CHOICES = 64 };

struct answer_call {
    char id[40];
    struct buf name, arguments;
};

/* One of the n answers. */
struct choice {
    struct answer *answer;
    size_t index;
    const struct token_list *prompt;
    uint64_t id; /* the scheduler's */
    bool submitted, ended;
    bool cut; /* complete by our own decision: what still comes is dropped */

    struct parser *parser; /* null: the text is the content */
    struct buf reasoning, content;
    struct answer_call *calls; /* [call_count] */
    size_t call_count, call_cap;

    bool thinking; /* its tokens are thoughts still */
    uint32_t reasoning_tokens, completion_tokens, prompt_tokens, cached_tokens;
    struct logprobs logprobs; /* those that the writer has not taken yet */
    size_t text_len;          /* without a parser: bytes so far */
    struct buf tail;          /* the newest bytes generated: tells which stop string it was */
    struct buf raw;           /* all of it, for the trace */
    enum finish finish;
    const char *stop; /* the stop string that ended it, or null */
    double first_token_s, decode_s;
};

struct answer_api {
    /* Reads answer->body: fills prompts and options. */
    bool (*read)(struct answer *answer, struct fault *fault);
    /* The whole reply, once all choices have ended: JSON, appended to `out`. */
    void (*whole)(struct answer *answer, struct buf *out);
    /* Streams; each appends events to answer->out. */
    void (*open)(struct answer *answer);
    void (*event)(struct choice *choice, const struct parser_event *event);
    void (*end)(struct choice *choice);
    void (*close)(struct answer *answer);
    void (*fail)(struct answer *answer, const struct fault *fault);
};

struct answer {
    struct server *server;
    const struct answer_api *api;
    atomic_int refs;            /* the connection, and each submitted choice */
    struct answer *prev, *next; /* of the server's list */
    struct mailbox box;
    atomic_bool left; /* the connection has gone: what still runs is to end */

    json_t *body;
    char id[48];
    const char *model; /* as the client named it; of the body, or the server's own name */
    int64_t created;
    bool stream, include_usage;

    /* What to generate. */
    struct token_list *prompts; /* [prompt_count] */
    size_t prompt_count;
    uint32_t keep_at[2];
    size_t n; /* choices a prompt */
    uint32_t max_tokens;
    struct sampler_options sampling;
    struct sampler_bias *bias;          /* owned */
    const char *stop[ANSWER_MAX_STOPS]; /* of the body */
    size_t stop_count;
    bool logprobs;
    uint32_t top_logprobs;
    bool raw;           /* no parser: completions */
    bool thinking_open; /* the prompt ends inside a think block */
    uint32_t think_tokens;
    json_t *tools; /* OpenAI form, or null; owned */
    bool one_call, no_calls;
    struct grammar *grammar; /* or null; owned */
    int32_t think_end;       /* id of </think>, or -1 */

    struct choice *choices; /* [count] */
    size_t count, ended;
    bool failed;
    struct fault fault; /* when failed */

    /* The stream. */
    struct exchange *exchange;
    struct buf out;
    size_t out_at;
    bool opened, closed;
    bool woken;        /* the engine, for what was submitted */
    uint64_t sent_ns;  /* when something was last sent */
    struct buf prefix; /* for the API's use: what opens each event */
    uint64_t sequence; /* likewise: a counter */
    json_t *items;     /* likewise */
    size_t block;      /* likewise: the open block or item */
    bool block_open;
    int block_kind;

    uint64_t start_ns, deadline_ns;
};

/* Handles a POST of this API. */
bool answer_handle(struct exchange *x, const struct answer_api *api);

/* An answer that is only read, by `read`, and never submitted; null with the fault. The exchange
 * keeps it. */
struct answer *answer_read_only(struct exchange *x,
                                bool (*read)(struct answer *answer, struct fault *fault),
                                struct fault *fault);

/* The connection needs it no more: what runs is cancelled. */
void answer_leave(struct answer *answer);

/* Makes all running answers of the server end now (it is closing). */
void answer_stop_all(struct server *server);

/* "prompt 12, cached 0, ..." for the log. */
void answer_describe(const struct answer *answer, char *out, size_t size);

/* Totals over the choices. */
struct answer_usage {
    uint64_t prompt, cached, completion, reasoning;
};
struct answer_usage answer_count(const struct answer *answer);

/* prefix + 24 hexadecimal digits that nobody can guess. */
void answer_make_id(const char *prefix, char *out, size_t size);

/* Text as a JSON string with invalid UTF-8 replaced; a new reference. */
json_t *answer_text(const char *text, size_t n);
static inline json_t *answer_buf_text(const struct buf *buf)
{
    return answer_text(buf->len ? buf->data : "", buf->len);
}

/* The double that is written as the fewest digits that read back to this float; a new reference. */
json_t *answer_float(float value);

/* Appends JSON without spaces, and drops the reference. */
void answer_write_json(struct buf *out, json_t *value);

/* What OpenAI's replies and chunks begin with: id to model; the object stays open. */
void answer_write_head(const struct answer *answer, const char *object, struct buf *out);

/* Appends `"text"`, escaped. */
void answer_append_quoted(struct buf *out, const char *text, size_t n);

/* Appends `event: NAME` (unless null), `data: JSON` and a blank line; takes the JSON over. */
void answer_send(struct answer *answer, const char *event, json_t *data);

#endif
