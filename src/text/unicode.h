/* What the tokenizer has to know of a code point. */
#ifndef TEXT_UNICODE_H
#define TEXT_UNICODE_H

#include <stdint.h>

enum unicode_flag {
    UNICODE_WORD = 1,   /* \p{L} or \p{M} */
    UNICODE_NUMBER = 2, /* \p{N} */
    UNICODE_SPACE = 4,  /* \s: White_Space */
    UNICODE_NFC = 8,    /* form C can change it, move it, or compose it with a neighbour */
};

/* The flags of cp, by Unicode 16; UNICODE_NFC as the `tokenizers` package has it (Unicode 9). The
 * table is our own, so that ids do not depend on the libraries of a machine. */
uint32_t unicode_flags(uint32_t cp);

#endif
