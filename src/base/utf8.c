#include "base/utf8.h"

/* Length of the sequence that lead byte c opens, and the bounds of its second byte; 0 for a byte
 * that opens none. */
static size_t utf8_shape(unsigned char c, unsigned char *lo, unsigned char *hi)
{
    *lo = 0x80;
    *hi = 0xbf;
    if (c < 0x80)
        return 1;
    if (c >= 0xc2 && c <= 0xdf)
        return 2;
    if (c >= 0xe0 && c <= 0xef) {
        if (c == 0xe0)
            *lo = 0xa0;
        if (c == 0xed)
            *hi = 0x9f;
        return 3;
    }
    if (c >= 0xf0 && c <= 0xf4) {
        if (c == 0xf0)
            *lo = 0x90;
        if (c == 0xf4)
            *hi = 0x8f;
        return 4;
    }
    return 0;
}

/* How many bytes at p fit the sequence that p[0] opens; *want is the full length (0: none). */
static size_t utf8_match(const char *p, size_t n, size_t *want)
{
    const unsigned char *s = (const unsigned char *)p;
    unsigned char lo, hi;
    *want = n ? utf8_shape(s[0], &lo, &hi) : 0;
    if (!*want)
        return 0;
    size_t have = 1;
    while (have < *want && have < n && s[have] >= lo && s[have] <= hi) {
        lo = 0x80;
        hi = 0xbf;
        have++;
    }
    return have;
}

size_t utf8_decode(const char *p, size_t n, uint32_t *cp)
{
    size_t want;
    if (utf8_match(p, n, &want) != want || !want)
        return 0;
    const unsigned char *s = (const unsigned char *)p;
    static const unsigned char mask[5] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t v = s[0] & mask[want];
    for (size_t i = 1; i < want; i++)
        v = v << 6 | (s[i] & 0x3f);
    *cp = v;
    return want;
}

size_t utf8_encode(uint32_t cp, char *out)
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

size_t utf8_incomplete_tail(const char *p, size_t n)
{
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        size_t want, have = utf8_match(p + n - back, back, &want);
        if (want > back && have == back)
            return back;
    }
    return 0;
}

size_t utf8_bad_length(const char *p, size_t n)
{
    size_t want, have = utf8_match(p, n, &want);
    return have ? have : 1;
}

size_t utf8_valid_prefix(const char *p, size_t n)
{
    size_t i = 0;
    uint32_t cp;
    while (i < n) {
        size_t k = utf8_decode(p + i, n - i, &cp);
        if (!k)
            break;
        i += k;
    }
    return i;
}
