/* Owns the table of code points: ranges in ascending order, the first at 0. */
#include "text/unicode.h"

#include <stddef.h>

#include "text/unicode_table.h"

uint32_t unicode_flags(uint32_t cp)
{
    size_t lo = 0, hi = sizeof unicode_table / sizeof *unicode_table;
    uint32_t key = cp << 4 | 15;
    while (hi - lo > 1) {
        size_t mid = (lo + hi) / 2;
        if (unicode_table[mid] <= key)
            lo = mid;
        else
            hi = mid;
    }
    return unicode_table[lo] & 15;
}
