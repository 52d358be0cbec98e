/* Ids to text as a stream. Invariant: held[0..held_len) is the beginning of a well-formed sequence
 * that the next id may complete; all bytes before it have been emitted. */
#include "text/tokenizer.h"

#include "base/utf8.h"

#include <assert.h>
#include <string.h>

static const char detokenizer_bad[] = "\xef\xbf\xbd";

/* Appends p[0..n) with each bad sequence replaced, but holds back an unfinished one at the end. */
static void detokenizer_write(struct detokenizer *d, const char *p, size_t n, struct buf *out)
{
    size_t tail = utf8_incomplete_tail(p, n);
    n -= tail;
    while (n) {
        size_t good = utf8_valid_prefix(p, n);
        buf_append(out, p, good);
        p += good;
        n -= good;
        if (!n)
            break;
        size_t bad = utf8_bad_length(p, n);
        buf_append(out, detokenizer_bad, 3);
        p += bad;
        n -= bad;
    }
    memcpy(d->held, p, tail);
    d->held_len = tail;
}

void detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out)
{
    size_t n;
    const char *bytes = tokenizer_bytes(d->tokenizer, id, &n);
    if (!n || (d->skip_special && tokenizer_is_special(d->tokenizer, id)))
        return;
    /* The held bytes and as many new ones as could complete them go first. */
    char joined[8];
    size_t held = d->held_len, take = n < 4 ? n : 4;
    if (held) {
        memcpy(joined, d->held, held);
        memcpy(joined + held, bytes, take);
        uint32_t cp;
        size_t len = utf8_decode(joined, held + take, &cp);
        if (!len && utf8_incomplete_tail(joined, held + take) == held + take) {
            assert(held + take <= 3);
            memcpy(d->held, joined, held + take);
            d->held_len = held + take;
            return;
        }
        if (len)
            buf_append(out, joined, len);
        else
            buf_append(out, detokenizer_bad, 3);
        d->held_len = 0;
        /* A bad sequence ends before the first byte that cannot go on with it: that byte is new. */
        size_t used = len ? len - held : utf8_bad_length(joined, held + take) - held;
        bytes += used;
        n -= used;
    }
    detokenizer_write(d, bytes, n, out);
}

void detokenizer_finish(struct detokenizer *d, struct buf *out)
{
    if (d->held_len)
        buf_append(out, detokenizer_bad, 3);
    d->held_len = 0;
}
