/* Form C with the tables of utf8proc.
 *
 * utf8proc's own ordering of combining marks takes quadratic time on long runs of marks, so the
 * marks are ordered here; decomposition and composition, both linear, are utf8proc's. */
#include "text/nfc.h"

#include "base/mem.h"
#include "base/utf8.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

bool nfc_is_plain(const char *p, size_t n)
{
    /* No character below U+0300 changes or is moved. U+0300 is the first lead byte 0xcc. */
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] >= 0xcc)
            return false;
    return true;
}

static int nfc_class(int32_t cp)
{
    return cp < 0x300 ? 0 : utf8proc_get_property(cp)->combining_class;
}

/* Puts cps[0..n), all of combining classes above 0, in ascending class; equal ones keep their
 * order. A counting sort: classes are below 256. */
static void nfc_order(int32_t *cps, size_t n, int32_t *scratch)
{
    size_t start[257] = {0};
    bool sorted = true;
    for (size_t i = 1; i < n && sorted; i++)
        sorted = nfc_class(cps[i - 1]) <= nfc_class(cps[i]);
    if (sorted)
        return;
    for (size_t i = 0; i < n; i++)
        start[nfc_class(cps[i]) + 1]++;
    for (int c = 0; c < 256; c++)
        start[c + 1] += start[c];
    for (size_t i = 0; i < n; i++)
        scratch[start[nfc_class(cps[i])]++] = cps[i];
    memcpy(cps, scratch, n * sizeof *cps);
}

void nfc_append(struct buf *out, const char *p, size_t n)
{
    enum { LONGEST = 4 }; /* code points that one decomposes to, canonically */
    size_t chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += ((unsigned char)p[i] & 0xc0) != 0x80;
    int32_t *cps = mem_new(chars * LONGEST, sizeof *cps);
    size_t count = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        i += utf8_decode(p + i, n - i, &cp);
        int last_class = 0;
        utf8proc_ssize_t k =
            utf8proc_decompose_char((utf8proc_int32_t)cp, cps + count, LONGEST,
                                    UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &last_class);
        assert(k >= 1 && k <= LONGEST);
        count += (size_t)k;
    }
    int32_t *scratch = mem_new(count, sizeof *scratch);
    for (size_t i = 0; i < count;) {
        size_t end = i;
        while (end < count && nfc_class(cps[end]))
            end++;
        nfc_order(cps + i, end - i, scratch);
        i = end + 1;
    }
    free(scratch);
    utf8proc_ssize_t composed =
        utf8proc_normalize_utf32(cps, (utf8proc_ssize_t)count, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    for (utf8proc_ssize_t i = 0; i < composed; i++) {
        char bytes[4];
        buf_append(out, bytes, utf8_encode((uint32_t)cps[i], bytes));
    }
    free(cps);
}
