/* The findings of a dispatch. A finding is kept once for each kind and machine address: one wrong
 * line would otherwise report once a thread. */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { FINDINGS_KEPT = 32 };

static struct emu_finding findings[FINDINGS_KEPT];
static int kept, total;

void report_begin(void)
{
    kept = 0;
    total = 0;
}

static bool report_is_known(const char *kind, const char *library, uint64_t offset)
{
    for (int i = 0; i < kept; i++)
        if (findings[i].library == library && findings[i].offset == offset &&
            !strcmp(findings[i].kind, kind))
            return true;
    return false;
}

void report_add(const char *kind, const void *site, const char *format, ...)
{
    total++;
    const struct library *library = library_of(site);
    /* A return address is one past the call; the byte before it is on the call's line. */
    uint64_t offset = library ? (uintptr_t)site - 1 - library->low : 0;
    const char *path = library ? library->path : NULL;
    if (kept == FINDINGS_KEPT || report_is_known(kind, path, offset))
        return;
    struct emu_finding *f = &findings[kept++];
    *f = (struct emu_finding){.library = path, .offset = offset, .thread = -1};
    snprintf(f->kind, sizeof f->kind, "%s", kind);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->message, sizeof f->message, format, arguments);
    va_end(arguments);
    const struct fiber *current = machine.current;
    if (current) {
        f->thread = (int32_t)current->thread.index_in_threadgroup;
        memcpy(f->threadgroup, current->thread.threadgroup_position, sizeof f->threadgroup);
    }
}

int report_count(void)
{
    return total;
}

const struct emu_finding *emu_finding(int i)
{
    return i >= 0 && i < kept ? &findings[i] : NULL;
}
