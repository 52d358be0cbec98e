/* The HTTP server: the OpenAI, Anthropic and Responses APIs on one engine.
 *
 * A connection has a thread of its own, which parses, renders, waits and writes; the engine's
 * thread runs the model. Between them is one bounded queue of events a request. Connection threads
 * never touch the device; the engine's thread never touches a socket. */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include "engine/engine.h"
#include "engine/scheduler.h"

struct server_options {
    const char *host;           /* address to bind; null: 127.0.0.1 */
    uint16_t port;              /* 0: any free one */
    const char *api_key;        /* null: none is asked for */
    const char *cors;           /* allowed origin or "*"; null: none */
    const char *model_name;     /* what /v1/models lists; null: "calla" */
    const char *trace;          /* file to append traces to; null: none */
    uint32_t parallel, queue;   /* the engine's and the scheduler's: bound n, and for /props */
    uint64_t max_body_bytes;    /* 0: 32 MiB */
    uint32_t max_connections;   /* 0: 256 */
    uint32_t request_timeout_s; /* from its arrival to its last byte; 0: 3600 */
    uint32_t arrive_ms;         /* for a request's headers, and to stay idle; 0: 60,000 */
    uint32_t body_ms;           /* for its body; 0: 120,000 */
    uint32_t stall_ms;          /* without reading anything of a reply; 0: 120,000 */
    uint32_t comment_ms;   /* from one sign of life of a silent stream to the next; 0: 10,000 */
    const char *cache_dir; /* for /props: the scheduler's, or null */
    void (*log_line)(const char *line); /* one a request, from any thread; or null */
};

struct server;

/* Binds and serves. Engine, scheduler and the strings of the options outlive the server. Fails with
 * ERR_USAGE for an address that cannot be had. */
bool server_open(struct engine *engine, struct scheduler *scheduler,
                 const struct server_options *options, struct server **out, struct err *err);

uint16_t server_port(const struct server *server);

/* Housekeeping, to be called about once a second: ends connections whose requests do not arrive. */
void server_tick(struct server *server);

/* Takes no new requests: later ones get 503. Returns how many are still running. */
uint32_t server_drain(struct server *server);

/* Ends what still runs with an error, closes every connection, and joins all threads. */
void server_close(struct server *server);

#endif
