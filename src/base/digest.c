#include "base/digest.h"

#include "base/mem.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __APPLE__
#include <CommonCrypto/CommonDigest.h>
typedef CC_SHA256_CTX digest_sha256;
typedef CC_SHA1_CTX digest_sha1;
#else
#include <nettle/sha1.h>
#include <nettle/sha2.h>
typedef struct sha256_ctx digest_sha256;
typedef struct sha1_ctx digest_sha1;
#endif

enum { DIGEST_CHUNK = 1 << 20, DIGEST_SHA256_BYTES = 32, DIGEST_SHA1_BYTES = 20 };

struct digest {
    enum digest_kind kind;
    digest_sha256 sha256;
    digest_sha1 sha1;
};

#ifdef __APPLE__
static void digest_start(struct digest *d)
{
    CC_SHA256_Init(&d->sha256);
    CC_SHA1_Init(&d->sha1);
}

static void digest_add(struct digest *d, size_t n, const uint8_t *bytes)
{
    if (d->kind == DIGEST_SHA256)
        CC_SHA256_Update(&d->sha256, bytes, (CC_LONG)n);
    else
        CC_SHA1_Update(&d->sha1, bytes, (CC_LONG)n);
}

static void digest_finish(struct digest *d, uint8_t *out)
{
    if (d->kind == DIGEST_SHA256)
        CC_SHA256_Final(out, &d->sha256);
    else
        CC_SHA1_Final(out, &d->sha1);
}
#else
static void digest_start(struct digest *d)
{
    sha256_init(&d->sha256);
    sha1_init(&d->sha1);
}

static void digest_add(struct digest *d, size_t n, const uint8_t *bytes)
{
    if (d->kind == DIGEST_SHA256)
        sha256_update(&d->sha256, n, bytes);
    else
        sha1_update(&d->sha1, n, bytes);
}

static void digest_finish(struct digest *d, uint8_t *out)
{
    if (d->kind == DIGEST_SHA256)
        sha256_digest(&d->sha256, DIGEST_SHA256_BYTES, out);
    else
        sha1_digest(&d->sha1, DIGEST_SHA1_BYTES, out);
}
#endif

static bool digest_stream(struct digest *d, FILE *file, digest_progress *progress, void *user)
{
    uint8_t *chunk = mem_new(DIGEST_CHUNK, 1);
    uint64_t done = 0;
    size_t n;
    while ((n = fread(chunk, 1, DIGEST_CHUNK, file)) > 0) {
        digest_add(d, n, chunk);
        done += n;
        if (progress)
            progress(user, done);
    }
    free(chunk);
    return !ferror(file);
}

bool digest_file(const char *path, enum digest_kind kind, digest_progress *progress, void *user,
                 char hex[DIGEST_HEX + 1], struct err *err)
{
    struct digest d = {.kind = kind};
    uint8_t out[DIGEST_SHA256_BYTES];
    FILE *file = fopen(path, "rb");
    if (!file)
        return err_set(err, ERR_INPUT, "cannot read %s: %s", path, strerror(errno));
    digest_start(&d);
    bool ok = true;
    if (kind == DIGEST_GIT_BLOB) {
        char head[40];
        ok = !fseeko(file, 0, SEEK_END);
        int n = snprintf(head, sizeof head, "blob %lld", (long long)ftello(file));
        digest_add(&d, (size_t)n + 1, (const uint8_t *)head);
        ok = ok && !fseeko(file, 0, SEEK_SET);
    }
    ok = ok && digest_stream(&d, file, progress, user);
    if (!ok)
        err_set(err, ERR_INPUT, "cannot read %s: %s", path, strerror(errno));
    fclose(file);
    if (!ok)
        return false;
    digest_finish(&d, out);
    size_t bytes = kind == DIGEST_SHA256 ? DIGEST_SHA256_BYTES : DIGEST_SHA1_BYTES;
    for (size_t i = 0; i < bytes; i++)
        snprintf(hex + 2 * i, 3, "%02x", out[i]);
    return true;
}
