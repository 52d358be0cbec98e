#include "base/buf.h"

#include "base/mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Room for n more bytes and the final zero; false when the ceiling forbids it. */
static bool buf_reserve(struct buf *buf, size_t n)
{
    size_t max = buf->max ? buf->max : BUF_MAX_DEFAULT;
    if (buf->full || n > max - buf->len) {
        buf->full = true;
        return false;
    }
    size_t need = buf->len + n;
    if (buf->data && need <= buf->cap)
        return true;
    size_t cap = buf->cap ? buf->cap : 64;
    while (cap < need)
        cap *= 2;
    if (cap > max)
        cap = max;
    buf->data = mem_grow(buf->data, cap + 1, 1);
    buf->cap = cap;
    return true;
}

void buf_append(struct buf *buf, const void *bytes, size_t n)
{
    if (!buf_reserve(buf, n))
        return;
    if (n)
        memcpy(buf->data + buf->len, bytes, n);
    buf->len += n;
    buf->data[buf->len] = 0;
}

void buf_append_text(struct buf *buf, const char *text)
{
    buf_append(buf, text, strlen(text));
}

void buf_append_char(struct buf *buf, char c)
{
    buf_append(buf, &c, 1);
}

void buf_printf(struct buf *buf, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0 || !buf_reserve(buf, (size_t)n))
        return;
    va_start(ap, fmt);
    vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    buf->len += (size_t)n;
}

void buf_consume(struct buf *buf, size_t n)
{
    if (n >= buf->len) {
        buf_clear(buf);
        return;
    }
    memmove(buf->data, buf->data + n, buf->len - n + 1);
    buf->len -= n;
}

void buf_clear(struct buf *buf)
{
    buf->len = 0;
    buf->full = false;
    if (buf->data)
        buf->data[0] = 0;
}

void buf_free(struct buf *buf)
{
    free(buf->data);
    *buf = (struct buf){.max = buf->max};
}
