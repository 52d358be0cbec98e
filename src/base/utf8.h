/* UTF-8 as in Unicode 15, table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef BASE_UTF8_H
#define BASE_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Length in bytes (1..4) of the well-formed sequence at p, and its code point in *cp; 0 when the
 * bytes at p are not well formed or the sequence is cut off by n. */
size_t utf8_decode(const char *p, size_t n, uint32_t *cp);

/* Writes cp (at most U+10FFFF, no surrogate) to out, at most 4 bytes; returns how many. */
size_t utf8_encode(uint32_t cp, char *out);

/* How many bytes at the end of p[0..n) begin a well-formed sequence that is still incomplete
 * (0..3): what a streaming writer holds back. */
size_t utf8_incomplete_tail(const char *p, size_t n);

/* How many bytes a decoder replaces by one U+FFFD at p, where utf8_decode returned 0: the longest
 * prefix of a well-formed sequence, at least 1 (the practice that Unicode recommends). */
size_t utf8_bad_length(const char *p, size_t n);

/* Offset of the first byte that is not part of a well-formed sequence; n when all is well. */
size_t utf8_valid_prefix(const char *p, size_t n);

#endif
