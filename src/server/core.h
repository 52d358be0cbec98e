/* The inside of struct server, for the files of server/ only. */
#ifndef SERVER_CORE_H
#define SERVER_CORE_H

#include "server/fault.h"
#include "server/metrics.h"
#include "server/server.h"
#include "server/trace.h"

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

struct answer;
struct connection;

struct server {
    struct engine *engine;
    struct scheduler *scheduler;
    struct server_options options; /* with the defaults filled in */
    struct MHD_Daemon *daemon;
    bool loopback; /* bound to an address that only this machine reaches */
    int64_t started;
    struct metrics metrics;
    struct trace *trace;               /* or null */
    atomic_uint_fast64_t bodies_bytes; /* of the bodies of all requests together */

    pthread_mutex_t lock;           /* of all that follows */
    struct connection *connections; /* a list */
    struct answer *answers;         /* a list: those that a connection waits for */
    uint32_t running;               /* requests that are being answered */
    bool draining, closing;
};

/* One HTTP request and its reply. */
struct exchange {
    struct server *server;
    struct MHD_Connection *connection;
    struct connection *record;
    const struct route *route; /* or null: there is none */
    char method[16], url[320]; /* cut: no path is as long */
    struct buf body;
    uint64_t body_bytes;     /* counted in the server's */
    bool too_large, crowded; /* the body is not kept: by its own size, by that of all */
    bool body_unread;        /* replied to by its head alone */
    bool last;               /* nothing more is taken from the connection */
    bool running;            /* counted by the server */
    bool interim;            /* HTTP/1.1: interim replies may go before the reply */
    int fd;
    uint64_t start_ns;
    int status;
    struct answer *answer; /* or null */
};

/* Queues the reply; false when the connection is to be closed. The exchange takes the JSON over. */
bool exchange_reply_json(struct exchange *x, int status, json_t *value);
bool exchange_reply_text(struct exchange *x, int status, const char *type, const void *text,
                         size_t n);
/* Takes the buffer's memory. */
bool exchange_reply_buf(struct exchange *x, int status, const char *type, struct buf *text);
bool exchange_reply_fault(struct exchange *x, const struct fault *fault);

/* A stream of server-sent events that `read` writes. */
bool exchange_reply_stream(struct exchange *x, MHD_ContentReaderCallback read, void *user);

/* Writes to a client that may have gone, before its reply: false when it has. */
bool exchange_probe(struct exchange *x);

/* The stream makes progress: the client is not stalled. */
void exchange_touch(struct exchange *x);

enum route_flag {
    ROUTE_OPEN = 1,      /* no key is asked for */
    ROUTE_BODY = 2,      /* takes a JSON object */
    ROUTE_ANTHROPIC = 4, /* errors in Anthropic's form */
    ROUTE_PREFIX = 8,    /* the path may go on */
};

struct route {
    const char *method, *path;
    unsigned flags;
    bool (*handle)(struct exchange *x);
};

extern const struct route route_table[]; /* ends with a null method */

#endif
