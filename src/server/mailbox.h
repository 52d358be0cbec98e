/* Events of one request on their way from the engine's thread to a connection's.
 *
 * Posting never blocks: past the ceiling it fails, and the request is to be cancelled. */
#ifndef SERVER_MAILBOX_H
#define SERVER_MAILBOX_H

#include "engine/engine.h"

#include <pthread.h>
#include <stdint.h>

enum mail_kind { MAIL_TOKEN, MAIL_PREFILL, MAIL_DONE };

struct mail {
    struct mail *next;
    enum mail_kind kind;
    size_t choice;

    int32_t id; /* MAIL_TOKEN; -1: the held rest */
    float logprob;
    uint32_t done, total; /* MAIL_PREFILL */

    /* MAIL_DONE */
    enum finish finish;
    int32_t stop_id;
    uint32_t prompt_tokens, cached_tokens, completion_tokens;
    double prefill_s, decode_s, first_token_s;
    enum err_kind error;

    size_t top_count;
    struct sampler_candidate *top; /* [top_count] */
    size_t len;
    char text[]; /* [len] the token's text, or the error's */
};

enum mailbox_wait {
    MAILBOX_MAIL,
    MAILBOX_TIMEOUT,
    MAILBOX_HALF, /* the client writes no more: it waits, or has gone; only writing to it tells */
    MAILBOX_GONE,
    MAILBOX_CLOSED
};

struct mailbox {
    pthread_mutex_t lock;
    struct mail *first, **last;
    size_t bytes; /* in the queue */
    int wake[2];  /* a pipe: readable when there is mail or the box is closed */
    bool signalled, closed, overflowed;
    bool half; /* MAILBOX_HALF was said, which happens once */
};

bool mailbox_open(struct mailbox *box, struct err *err);
void mailbox_free(struct mailbox *box); /* with the mail that is left */

/* A mail of the kind, with text copied in and room for `top_count` candidates. */
struct mail *mail_new(enum mail_kind kind, size_t choice, const char *text, size_t len,
                      size_t top_count);
void mail_free(struct mail *mail);

/* Takes the mail over. False: the box is full, or nobody reads it; a MAIL_DONE always goes in. */
bool mailbox_post(struct mailbox *box, struct mail *mail);

/* Nobody is to wait any more: a waiting thread returns at once with MAILBOX_CLOSED. */
void mailbox_shut(struct mailbox *box);

/* Waits at most until deadline_ns (clock_now_ns) for mail, while watching the client's socket (-1:
 * none), and hands over all there is, oldest first. */
enum mailbox_wait mailbox_take(struct mailbox *box, int fd, uint64_t deadline_ns,
                               struct mail **out);

#endif
