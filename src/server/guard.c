/* A server on loopback is reached by every web page that its user opens: a page can post to it
 * without reading the reply, and a rebound DNS name can read it too. So a request that names a
 * foreign origin is refused unless CORS was asked for, and without a key the host must be a name of
 * this machine. */
#include "server/guard.h"

#include <string.h>
#include <strings.h>

static const char *guard_header(const struct exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

/* Takes the same time wherever the texts differ. */
static bool guard_equal(const char *given, const char *key)
{
    size_t n = strlen(given), m = strlen(key);
    unsigned char differ = n != m;
    for (size_t i = 0; i < n; i++)
        differ |= (unsigned char)(given[i] ^ key[i % (m ? m : 1)]);
    return !differ;
}

static bool guard_has_key(const struct exchange *x, const char *key)
{
    const char *bearer = guard_header(x, "Authorization"), *own = guard_header(x, "x-api-key");
    if (bearer && !strncasecmp(bearer, "Bearer ", 7) && guard_equal(bearer + 7, key))
        return true;
    return own && guard_equal(own, key);
}

/* host, perhaps with a port, is a name of loopback. */
static bool guard_is_local(const char *host)
{
    static const char *const names[] = {"localhost", "127.0.0.1", "[::1]"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t n = strlen(names[i]);
        if (!strncasecmp(host, names[i], n) && (host[n] == 0 || host[n] == ':'))
            return true;
    }
    return false;
}

static bool guard_check_origin(const struct exchange *x, struct fault *fault)
{
    const char *origin = guard_header(x, "Origin"), *host = guard_header(x, "Host");
    const char *cors = x->server->options.cors;
    if (!origin || (cors && (!strcmp(cors, "*") || !strcmp(cors, origin))))
        return true;
    const char *name = strstr(origin, "://");
    if (name && host && !strcasecmp(name + 3, host))
        return true;
    return fault_set_status(fault, 403, "origin_not_allowed",
                            "requests from the web origin %.200s are not allowed; start the server "
                            "with --cors %.200s",
                            origin, origin);
}

bool guard_admit(const struct exchange *x, struct fault *fault)
{
    const struct server_options *options = &x->server->options;
    const char *host = guard_header(x, "Host");
    bool open = x->route && (x->route->flags & ROUTE_OPEN);
    if (!options->api_key && x->server->loopback && host && !guard_is_local(host))
        return fault_set_status(fault, 403, "host_not_allowed",
                                "the host name %.200s is not this machine's loopback; start the "
                                "server with --api-key to serve other names",
                                host);
    if (!guard_check_origin(x, fault))
        return false;
    if (!options->api_key || open || !strcmp(x->method, "OPTIONS") ||
        guard_has_key(x, options->api_key))
        return true;
    return fault_set_status(fault, 401, "invalid_api_key",
                            "the API key is missing or wrong; send it as Authorization: Bearer KEY "
                            "or x-api-key: KEY");
}
