/* Replies: what a handler hands to libmicrohttpd, with the headers that every reply has. */
#include "server/core.h"

#include "text/pyjson.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

static const char *exchange_header(struct exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

static void exchange_add_headers(struct exchange *x, struct MHD_Response *response,
                                 const char *type, int status)
{
    const char *cors = x->server->options.cors;
    MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (x->last)
        MHD_add_response_header(response, "Connection", "close");
    if (status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (status == 503 || status == 429)
        MHD_add_response_header(response, "Retry-After", "1");
    if (cors && exchange_header(x, "Origin")) {
        MHD_add_response_header(response, "Access-Control-Allow-Origin", cors);
        MHD_add_response_header(response, "Vary", "Origin");
        if (!strcmp(x->method, "OPTIONS")) {
            const char *wanted = exchange_header(x, "Access-Control-Request-Headers");
            MHD_add_response_header(response, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
            MHD_add_response_header(response, "Access-Control-Allow-Headers",
                                    wanted ? wanted : "Authorization, Content-Type");
            MHD_add_response_header(response, "Access-Control-Max-Age", "600");
        }
    }
}

static bool exchange_queue(struct exchange *x, int status, const char *type,
                           struct MHD_Response *response)
{
    if (!response)
        return false;
    exchange_add_headers(x, response, type, status);
    x->status = status;
    bool ok = MHD_queue_response(x->connection, (unsigned)status, response) == MHD_YES;
    MHD_destroy_response(response);
    return ok;
}

bool exchange_reply_text(struct exchange *x, int status, const char *type, const void *text,
                         size_t n)
{
    return exchange_queue(x, status, type,
                          MHD_create_response_from_buffer(n, (void *)text, MHD_RESPMEM_MUST_COPY));
}

bool exchange_reply_json(struct exchange *x, int status, json_t *value)
{
    struct buf text = {.max = SIZE_MAX / 2};
    if (value)
        pyjson_append_compact(&text, value);
    json_decref(value);
    if (!text.len)
        return exchange_reply_text(x, 500, "text/plain", "", 0);
    return exchange_reply_buf(x, status, "application/json", &text);
}

bool exchange_reply_buf(struct exchange *x, int status, const char *type, struct buf *text)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(text->len, text->data, MHD_RESPMEM_MUST_FREE);
    if (!response)
        buf_free(text);
    *text = (struct buf){0};
    return exchange_queue(x, status, type, response);
}

/* A client that has closed its side to write and one that has closed all look the same until bytes
 * are sent, which draw a reset from the latter. Clients skip this interim reply whether they asked
 * for it or not (RFC 9110, 15.2.1). HTTP/1.0 has none; there whoever closes ends the request (RFC
 * 1945, 1.3). */
bool exchange_probe(struct exchange *x)
{
    static const char interim[] = "HTTP/1.1 100 Continue\r\n\r\n";
    if (!x->interim)
        return false;
    ssize_t n = send(x->fd, interim, sizeof interim - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    return n == sizeof interim - 1 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
}

bool exchange_reply_fault(struct exchange *x, const struct fault *fault)
{
    bool anthropic = x->route && (x->route->flags & ROUTE_ANTHROPIC);
    return exchange_reply_json(x, fault->status,
                               anthropic ? fault_anthropic_json(fault) : fault_openai_json(fault));
}

bool exchange_reply_stream(struct exchange *x, MHD_ContentReaderCallback read, void *user)
{
    enum { EXCHANGE_BLOCK = 8192 };
    struct MHD_Response *response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, EXCHANGE_BLOCK, read, user, NULL);
    if (response)
        MHD_add_response_header(response, "X-Accel-Buffering", "no");
    return exchange_queue(x, 200, "text/event-stream", response);
}
