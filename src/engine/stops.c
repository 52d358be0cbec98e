/* Watches for stop strings, byte by byte.
 *
 * Invariant: held is a proper prefix of some stop string, the longest that the text so far ends
 * with; so everything before it has been emitted. */
#include "engine/stops.h"

#include <string.h>

/* Length of the longest stop string that held ends with; 0 when there is none. */
static size_t stops_complete(const struct stops *stops)
{
    size_t longest = 0;
    for (size_t i = 0; i < stops->count; i++) {
        size_t n = strlen(stops->strings[i]);
        if (n > longest && n <= stops->held.len &&
            !memcmp(stops->held.data + stops->held.len - n, stops->strings[i], n))
            longest = n;
    }
    return longest;
}

/* How many bytes at the front of held no longer matter. */
static size_t stops_certain(const struct stops *stops)
{
    for (size_t start = 0; start < stops->held.len; start++)
        for (size_t i = 0; i < stops->count; i++)
            if (!strncmp(stops->strings[i], stops->held.data + start, stops->held.len - start))
                return start;
    return stops->held.len;
}

void stops_push(struct stops *stops, const char *text, size_t n, struct buf *out)
{
    if (stops->count == 0) {
        buf_append(out, text, n);
        return;
    }
    for (size_t i = 0; i < n && !stops->hit; i++) {
        buf_append_char(&stops->held, text[i]);
        size_t stop = stops_complete(stops);
        if (stop) {
            stops->hit = true;
            buf_append(out, stops->held.data, stops->held.len - stop);
            buf_clear(&stops->held);
            return;
        }
        size_t certain = stops_certain(stops);
        buf_append(out, stops->held.data, certain);
        buf_consume(&stops->held, certain);
    }
}

void stops_finish(struct stops *stops, struct buf *out)
{
    buf_append(out, stops->held.data, stops->held.len);
    buf_clear(&stops->held);
}

void stops_free(struct stops *stops)
{
    buf_free(&stops->held);
}
