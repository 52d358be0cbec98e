/* Form C, a run at a time.
 *
 * A code point without UNICODE_NFC never changes, and nothing moves or composes across it; so the
 * text falls into runs that are normalised one by one, and most are copied. Decomposition and
 * composition are utf8proc's. Its ordering of combining marks takes quadratic time on long runs of
 * marks, so they are ordered here. */
#include "text/nfc.h"

#include "base/mem.h"
#include "base/utf8.h"
#include "text/unicode.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum {
    NFC_LONGEST = 4,       /* code points that one decomposes to, canonically */
    NFC_FIRST_MARK = 0x300 /* no code point below changes unless one from here on follows */
};

/* Working memory of one call. */
struct nfc {
    int32_t *cps;     /* [cap] */
    int32_t *scratch; /* [cap] */
    size_t cap;
};

bool nfc_is_plain(const char *p, size_t n)
{
    /* U+0300 is the first character that begins with the byte 0xcc. */
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] >= 0xcc)
            return false;
    return true;
}

static int nfc_class(int32_t cp)
{
    return cp < NFC_FIRST_MARK ? 0 : utf8proc_get_property(cp)->combining_class;
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

/* Appends a run of code points that all have UNICODE_NFC. */
static void nfc_append_run(struct nfc *nfc, struct buf *out, const char *p, size_t n)
{
    if (n * NFC_LONGEST > nfc->cap) {
        nfc->cap = n * NFC_LONGEST * 2;
        nfc->cps = mem_grow(nfc->cps, nfc->cap, sizeof *nfc->cps);
        nfc->scratch = mem_grow(nfc->scratch, nfc->cap, sizeof *nfc->scratch);
    }
    int32_t *cps = nfc->cps;
    size_t count = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int unused = 0;
        i += utf8_decode(p + i, n - i, &cp);
        utf8proc_ssize_t k = utf8proc_decompose_char((utf8proc_int32_t)cp, cps + count, NFC_LONGEST,
                                                     UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &unused);
        assert(k >= 1 && k <= NFC_LONGEST);
        count += (size_t)k;
    }
    for (size_t i = 0, end; i < count; i = end + 1) {
        for (end = i; end < count && nfc_class(cps[end]); end++)
            ;
        nfc_order(cps + i, end - i, nfc->scratch);
    }
    utf8proc_ssize_t composed =
        utf8proc_normalize_utf32(cps, (utf8proc_ssize_t)count, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    for (utf8proc_ssize_t i = 0; i < composed; i++) {
        char bytes[4];
        buf_append(out, bytes, utf8_encode((uint32_t)cps[i], bytes));
    }
}

void nfc_append(struct buf *out, const char *p, size_t n)
{
    struct nfc nfc = {0};
    size_t from = 0, at = 0; /* p[from..at) is a run: all with UNICODE_NFC, or none */
    bool run_takes_part = false, run_may_change = false;
    for (;;) {
        uint32_t cp = 0;
        size_t len = at < n ? utf8_decode(p + at, n - at, &cp) : 0;
        bool takes_part = len && (unicode_flags(cp) & UNICODE_NFC);
        if (!len || takes_part != run_takes_part) {
            if (run_may_change)
                nfc_append_run(&nfc, out, p + from, at - from);
            else
                buf_append(out, p + from, at - from);
            from = at;
            run_takes_part = takes_part;
            run_may_change = false;
        }
        if (!len)
            break;
        run_may_change |= takes_part && cp >= NFC_FIRST_MARK;
        at += len;
    }
    free(nfc.cps);
    free(nfc.scratch);
}
