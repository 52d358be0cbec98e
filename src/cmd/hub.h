/* A model repository at a Hugging Face hub: which files it has, of which size and checksum.
 *
 * The access token goes to the endpoint's own host alone, over TLS or to this machine, and into no
 * message. */
#ifndef CMD_HUB_H
#define CMD_HUB_H

#include "base/digest.h"
#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

/* What every request needs. */
struct hub {
    const char *endpoint; /* http or https, without a final slash */
    const char *token;    /* null: none */
};

struct hub_file {
    char *name; /* one path part; no dot in front */
    uint64_t bytes;
    enum digest_kind kind;
    char hex[DIGEST_HEX + 1];
};

struct hub_list {
    char revision[DIGEST_HEX + 1]; /* the commit, so that all files are of one version */
    struct hub_file *files;        /* those that Calla reads */
    size_t count;
    uint64_t bytes; /* of all */
};

/* Checks the endpoint and takes the token from HF_TOKEN. */
bool hub_open(struct hub *hub, const char *endpoint, struct err *err);

/* Lists a repository's branch main; hub_list_free releases it. */
bool hub_list(const struct hub *hub, const char *name, struct hub_list *list, struct err *err);
void hub_list_free(struct hub_list *list);

/* The address of a file; the caller frees it. */
char *hub_file_url(const struct hub *hub, const char *name, const char *revision, const char *file);

/* Sets on a curl handle what all requests share: protocols, time limits, redirects, the token. */
void hub_set_request(const struct hub *hub, void *easy, const char *url);

/* What a refusal by status means and what to do; returns false. */
bool hub_fail(const struct hub *hub, const char *name, long status, struct err *err);

/* Statuses after which asking again helps: 408, 429, 500, 502, 503, 504. */
bool hub_may_retry(long status);

/* Errors of curl after which asking again helps; code is a CURLcode. */
bool hub_may_retry_error(int code);

#endif
