/* Checksums of files: SHA-256, and the SHA-1 that git gives a blob ("blob SIZE" and a zero byte go
 * before the content). The arithmetic is the platform's: nettle, or CommonCrypto on macOS. */
#ifndef BASE_DIGEST_H
#define BASE_DIGEST_H

#include "base/err.h"

#include <stdint.h>

enum digest_kind { DIGEST_SHA256, DIGEST_GIT_BLOB };

enum { DIGEST_HEX = 64 }; /* characters of the longest digest, without the final zero */

/* Called now and then with the bytes read so far. */
typedef void digest_progress(void *user, uint64_t done);

/* Reads the file and puts its digest into hex, in small letters. progress may be null. */
bool digest_file(const char *path, enum digest_kind kind, digest_progress *progress, void *user,
                 char hex[DIGEST_HEX + 1], struct err *err);

#endif
