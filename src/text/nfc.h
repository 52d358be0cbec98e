/* Unicode normalisation form C. */
#ifndef TEXT_NFC_H
#define TEXT_NFC_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>

/* True when p[0..n), well-formed UTF-8, is surely in form C already; false means perhaps not. */
bool nfc_is_plain(const char *p, size_t n);

/* Appends p[0..n), well-formed UTF-8, in form C. Time is linear in n. */
void nfc_append(struct buf *out, const char *p, size_t n);

#endif
