/* SPLIT_PATTERN by hand.
 *
 * A backtracking matcher needs quadratic time for `\s+(?!\S)` and `\s*[\r\n]+` on long runs of
 * space, or a stack as deep as the text. Here every run is looked at a fixed number of times: a
 * piece's first character and the one after it decide which alternative matches, and each
 * alternative then takes a whole run. The unit tests compare this with the pattern under PCRE2. */
#include "text/split.h"

#include "base/utf8.h"
#include "text/unicode.h"

#include <stdint.h>

enum split_class {
    SPLIT_WORD,   /* \p{L} or \p{M} */
    SPLIT_NUMBER, /* \p{N} */
    SPLIT_SPACE,  /* \s but \r and \n */
    SPLIT_LINE,   /* \r \n */
    SPLIT_OTHER,
    SPLIT_END, /* past the text */
};

/* Class of the character at p, its length in *len (0 past the end) and its code point in *cp. */
static enum split_class split_look(const char *p, size_t n, size_t *len, uint32_t *cp)
{
    *len = 0;
    *cp = 0;
    if (!n)
        return SPLIT_END;
    *len = utf8_decode(p, n, cp);
    uint32_t c = *cp;
    if (c < 0x80) {
        if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z')
            return SPLIT_WORD;
        if (c >= '0' && c <= '9')
            return SPLIT_NUMBER;
        if (c == '\r' || c == '\n')
            return SPLIT_LINE;
        return c == ' ' || (c >= 9 && c <= 13) ? SPLIT_SPACE : SPLIT_OTHER;
    }
    uint32_t flags = unicode_flags(c);
    if (flags & UNICODE_WORD)
        return SPLIT_WORD;
    if (flags & UNICODE_NUMBER)
        return SPLIT_NUMBER;
    if (flags & UNICODE_SPACE)
        return SPLIT_SPACE;
    return SPLIT_OTHER;
}

/* End of the run of one class that goes on at `at`. */
static size_t split_run(const char *p, size_t n, size_t at, enum split_class want)
{
    size_t len;
    uint32_t cp;
    while (split_look(p + at, n - at, &len, &cp) == want)
        at += len;
    return at;
}

/* Length of 's 't 're 've 'm 'll 'd at p in either case; 0 when there is none. The long s, U+017F,
 * folds to s. */
static size_t split_contraction(const char *p, size_t n)
{
    if (n < 2 || *p != '\'')
        return 0;
    char a = p[1] | 0x20, b = n > 2 ? p[2] | 0x20 : 0;
    if (p[1] & 0x80)
        return n > 2 && p[1] == '\xc5' && p[2] == '\xbf' ? 3 : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
        return 3;
    return 0;
}

/* A run of white space that no alternative before these took:
 * \s*[\r\n]+ up to the last line end in it; else \s+(?!\S), all but the last character, or all of
 * it at the end of the text; else \s+, which is then one character. */
static size_t split_space(const char *p, size_t n)
{
    size_t at = 0, last = 0, after_line = 0, len;
    uint32_t cp;
    for (;;) {
        enum split_class class = split_look(p + at, n - at, &len, &cp);
        if (class != SPLIT_SPACE && class != SPLIT_LINE) {
            if (after_line)
                return after_line;
            return class == SPLIT_END || !last ? at : last;
        }
        last = at;
        at += len;
        if (class == SPLIT_LINE)
            after_line = at;
    }
}

size_t split_piece(const char *p, size_t n)
{
    size_t len, next_len, contraction = split_contraction(p, n);
    uint32_t cp, next_cp;
    if (contraction)
        return contraction;
    enum split_class class = split_look(p, n, &len, &cp);
    if (class == SPLIT_WORD)
        return split_run(p, n, len, SPLIT_WORD);
    if (class == SPLIT_NUMBER)
        return len;
    if (class == SPLIT_LINE)
        return split_space(p, n);
    enum split_class next = split_look(p + len, n - len, &next_len, &next_cp);
    if (next == SPLIT_WORD)
        return split_run(p, n, len, SPLIT_WORD);
    if (class == SPLIT_OTHER || (cp == ' ' && next == SPLIT_OTHER)) {
        size_t end = split_run(p, n, len, SPLIT_OTHER);
        return split_run(p, n, end, SPLIT_LINE);
    }
    return split_space(p, n);
}
