/* A growable byte buffer with a ceiling.
 *
 * Invariant: data[len] is 0 whenever data is not null, so data can be used as a C string. A buffer
 * that would pass its ceiling sets `full`, keeps what it has, and ignores the rest; check `full`
 * once at the end instead of after every append. */
#ifndef BASE_BUF_H
#define BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

struct buf {
    char *data; /* u8 [cap + 1] or null */
    size_t len, cap;
    size_t max; /* ceiling in bytes; 0 means BUF_MAX_DEFAULT */
    bool full;
};

enum { BUF_MAX_DEFAULT = 1 << 28 };

void buf_append(struct buf *buf, const void *bytes, size_t n);
void buf_append_text(struct buf *buf, const char *text);
void buf_append_char(struct buf *buf, char c);
void buf_printf(struct buf *buf, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Drops the first n bytes and moves the rest down. */
void buf_consume(struct buf *buf, size_t n);

/* Empties the buffer and keeps its memory. */
void buf_clear(struct buf *buf);

/* Releases the memory; the buffer is empty and usable afterwards. */
void buf_free(struct buf *buf);

#endif
