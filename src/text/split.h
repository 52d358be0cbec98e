/* Cuts text into the pieces that BPE works on. */
#ifndef TEXT_SPLIT_H
#define TEXT_SPLIT_H

#include <stddef.h>

/* The pattern of qwen3_5_moe; every match is a piece, and the matches cover the whole text. Unlike
 * its forerunners' it takes combining marks for parts of words. */
#define SPLIT_PATTERN                                                                              \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"                    \
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* Length in bytes of the piece at p, at least 1 for n > 0. p[0..n) is well-formed UTF-8, and begins
 * where a piece begins. Cutting a whole text so takes time linear in its length. */
size_t split_piece(const char *p, size_t n);

#endif
