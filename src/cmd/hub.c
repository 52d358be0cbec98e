#include "cmd/hub.h"

#include "base/buf.h"
#include "base/mem.h"

#include <ctype.h>
#include <curl/curl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HUB_LIST_BYTES = 1 << 24, HUB_FILES = 400, HUB_TRIES = 5 };

/* Plain http carries a token only to this machine. */
static bool hub_is_private(const char *endpoint)
{
    static const char *const here[] = {"http://127.0.0.1", "http://localhost", "http://[::1]"};
    if (!strncmp(endpoint, "https://", 8))
        return true;
    for (size_t i = 0; i < sizeof here / sizeof *here; i++) {
        size_t n = strlen(here[i]);
        if (!strncmp(endpoint, here[i], n) && (!endpoint[n] || strchr(":/", endpoint[n])))
            return true;
    }
    return false;
}

bool hub_open(struct hub *hub, const char *endpoint, struct err *err)
{
    *hub = (struct hub){.endpoint = endpoint};
    if (strncmp(endpoint, "https://", 8) && strncmp(endpoint, "http://", 7))
        return err_set(err, ERR_USAGE, "--endpoint wants http://... or https://..., not '%s'",
                       endpoint);
    if (strchr(endpoint, '@') || strchr(endpoint, '?') || strchr(endpoint, '#'))
        return err_set(err, ERR_USAGE,
                       "--endpoint wants a host and perhaps a path; a token goes "
                       "into the environment variable HF_TOKEN");
    const char *token = getenv("HF_TOKEN");
    if (!token || !*token)
        return true;
    for (const char *p = token; *p; p++)
        if (!isgraph((unsigned char)*p))
            return err_set(err, ERR_USAGE,
                           "HF_TOKEN holds blanks or control characters; set it "
                           "to the token alone");
    if (!hub_is_private(endpoint))
        return err_set(err, ERR_USAGE,
                       "HF_TOKEN is set and the endpoint %s is not https, so the "
                       "token could be read on the way; unset one of them",
                       endpoint);
    hub->token = token;
    return true;
}

void hub_set_request(const struct hub *hub, void *easy, const char *url)
{
    bool tls = !strncmp(url, "https://", 8);
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "calla");
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(easy, CURLOPT_MAXREDIRS, 8L);
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS_STR, tls ? "https" : "http,https");
#else
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
    curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS,
                     (long)(CURLPROTO_HTTPS | (tls ? 0 : CURLPROTO_HTTP)));
#endif
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, 20L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, 30L);
    if (hub->token) {
        /* As credentials, not as a header: curl keeps them from other hosts after a redirect. */
        curl_easy_setopt(easy, CURLOPT_HTTPAUTH, (long)CURLAUTH_BEARER);
        curl_easy_setopt(easy, CURLOPT_XOAUTH2_BEARER, hub->token);
    }
}

bool hub_may_retry(long status)
{
    return status == 408 || status == 429 || status == 500 || status == 502 || status == 503 ||
           status == 504;
}

/* CURLE_UNSUPPORTED_PROTOCOL is not here: it is also what a connection cut within the first line of
 * an answer looks like. */
bool hub_may_retry_error(int code)
{
    switch (code) {
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_TOO_MANY_REDIRECTS:
    case CURLE_URL_MALFORMAT:
    case CURLE_WRITE_ERROR:
        return false;
    default:
        return true;
    }
}

bool hub_fail(const struct hub *hub, const char *name, long status, struct err *err)
{
    const char *token = hub->token ? "check that the token in HF_TOKEN may read it"
                                   : "set HF_TOKEN to a token that may read it";
    if (status == 401)
        return err_set(err, ERR_INPUT,
                       "%s refuses %s (401): it is private, gated or not there; check the name, "
                       "or %s",
                       hub->endpoint, name, token);
    if (status == 403)
        return err_set(err, ERR_INPUT, "%s refuses %s (403): accept its terms at %s/%s, and %s",
                       hub->endpoint, name, hub->endpoint, name, token);
    if (status == 404)
        return err_set(err, ERR_INPUT, "%s has no %s (404); check the name", hub->endpoint, name);
    if (status == 429)
        return err_set(err, ERR_INPUT,
                       "%s limits requests (429); wait some minutes, then run the same command "
                       "again: it goes on from here",
                       hub->endpoint);
    return err_set(err, ERR_INPUT, "%s answers %s with status %ld; try again later", hub->endpoint,
                   name, status);
}

char *hub_file_url(const struct hub *hub, const char *name, const char *revision, const char *file)
{
    char *escaped = curl_easy_escape(NULL, file, 0);
    struct buf url = {0};
    buf_printf(&url, "%s/%s/resolve/%s/%s", hub->endpoint, name, revision, escaped ? escaped : "");
    curl_free(escaped);
    return url.data;
}

static size_t hub_take(char *bytes, size_t size, size_t n, void *user)
{
    struct buf *out = user;
    buf_append(out, bytes, size * n);
    return out->full ? 0 : size * n;
}

/* The body of a GET, tried again while that can help. */
static bool hub_get(const struct hub *hub, const char *name, const char *url, struct buf *out,
                    struct err *err)
{
    bool ok = false;
    CURL *easy = curl_easy_init();
    if (!easy)
        return err_set(err, ERR_RESOURCE, "no memory for a connection");
    hub_set_request(hub, easy, url);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, hub_take);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, out);
    for (int attempt = 1; !ok; attempt++) {
        long status = 0;
        curl_off_t after = 0;
        buf_clear(out);
        CURLcode code = curl_easy_perform(easy);
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &after);
        ok = code == CURLE_OK && status == 200;
        if (ok)
            break;
        if (code == CURLE_OK)
            hub_fail(hub, name, status, err);
        else if (out->full)
            err_set(err, ERR_INPUT, "the list of %s is larger than %d bytes", name, HUB_LIST_BYTES);
        else
            err_set(err, ERR_INPUT, "cannot reach %s: %s; check the network and the address",
                    hub->endpoint, curl_easy_strerror(code));
        if (attempt == HUB_TRIES ||
            !(code == CURLE_OK ? hub_may_retry(status) : hub_may_retry_error((int)code)))
            break;
        uint64_t ms = after > 0 ? (uint64_t)(after < 60 ? after : 60) * 1000 : 250u << attempt;
        nanosleep(&(struct timespec){(time_t)(ms / 1000), (long)(ms % 1000) * 1000000}, NULL);
    }
    curl_easy_cleanup(easy);
    return ok;
}

/* Calla reads what lies at the top: weights, their index, the tokenizer and its templates. */
static bool hub_wants(const char *name)
{
    static const char *const ends[] = {".safetensors", ".json", ".jinja", "merges.txt", "LICENSE"};
    size_t n = strlen(name);
    if (*name == '.' || strchr(name, '/') || n > 200)
        return false;
    for (const char *p = name; *p; p++)
        if (iscntrl((unsigned char)*p) || *p == '\\')
            return false;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        size_t m = strlen(ends[i]);
        if (n >= m && !strcmp(name + n - m, ends[i]))
            return true;
    }
    return false;
}

static bool hub_is_hex(const char *text, size_t n)
{
    return text && strlen(text) == n && strspn(text, "0123456789abcdef") == n;
}

static bool hub_take_file(struct hub_list *list, const json_t *entry, struct err *err)
{
    const char *name = json_string_value(json_object_get(entry, "rfilename"));
    const json_t *lfs = json_object_get(entry, "lfs");
    const json_t *size = json_object_get(json_is_object(lfs) ? lfs : entry, "size");
    if (!name)
        return err_set(err, ERR_INPUT, "the hub's list has an entry without a name");
    if (!hub_wants(name))
        return true;
    struct hub_file file = {.bytes = (uint64_t)json_integer_value(size)};
    const char *hex = json_string_value(json_is_object(lfs) ? json_object_get(lfs, "sha256")
                                                            : json_object_get(entry, "blobId"));
    file.kind = json_is_object(lfs) ? DIGEST_SHA256 : DIGEST_GIT_BLOB;
    if (!json_is_integer(size) || json_integer_value(size) < 0 ||
        json_integer_value(size) > (json_int_t)1 << 44 ||
        !hub_is_hex(hex, file.kind == DIGEST_SHA256 ? 64 : 40))
        return err_set(err, ERR_INPUT, "the hub's list gives no size or no checksum for %s", name);
    if (list->count == HUB_FILES)
        return err_set(err, ERR_INPUT, "the repository has more than %d files to fetch", HUB_FILES);
    memcpy(file.hex, hex, strlen(hex) + 1);
    file.name = mem_copy_text(name, strlen(name));
    list->files = mem_grow(list->files, list->count + 1, sizeof *list->files);
    list->files[list->count++] = file;
    list->bytes += file.bytes;
    return true;
}

static bool hub_parse(const struct buf *text, const char *name, struct hub_list *list,
                      struct err *err)
{
    json_t *root = json_loadb(text->data ? text->data : "", text->len, 0, NULL);
    const char *revision = json_string_value(json_object_get(root, "sha"));
    const json_t *files = json_object_get(root, "siblings"), *entry;
    bool ok = hub_is_hex(revision, 40) && json_is_array(files), config = false, weights = false;
    size_t i;
    if (!ok)
        err_set(err, ERR_INPUT, "the answer for %s is not a hub's list of files; check --endpoint",
                name);
    else
        memcpy(list->revision, revision, 41);
    if (ok)
        json_array_foreach(files, i, entry) ok = ok && hub_take_file(list, entry, err);
    json_decref(root);
    for (i = 0; i < list->count; i++) {
        const char *dot = strrchr(list->files[i].name, '.');
        config = config || !strcmp(list->files[i].name, "config.json");
        weights = weights || (dot && !strcmp(dot, ".safetensors"));
    }
    if (ok && !(config && weights))
        ok = err_set(
            err, ERR_INPUT,
            "%s has no config.json or no *.safetensors: it is not a model that Calla reads", name);
    return ok;
}

bool hub_list(const struct hub *hub, const char *name, struct hub_list *list, struct err *err)
{
    struct buf url = {0}, text = {.max = HUB_LIST_BYTES};
    *list = (struct hub_list){0};
    buf_printf(&url, "%s/api/models/%s/revision/main?blobs=true", hub->endpoint, name);
    bool ok = hub_get(hub, name, url.data, &text, err) && hub_parse(&text, name, list, err);
    buf_free(&url);
    buf_free(&text);
    if (!ok)
        hub_list_free(list);
    return ok;
}

void hub_list_free(struct hub_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->files[i].name);
    free(list->files);
    *list = (struct hub_list){0};
}
