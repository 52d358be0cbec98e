/* What the kernel's memory is, and whether an access to it is right.
 *
 * Device buffers are regions of exact size between unmapped pages. Threadgroup memory is an arena
 * in which each variable has a slot with a gap after it. In a checked build every access of kernel
 * code comes to memory_access(), which finds the region or slot and then looks at one shadow cell
 * a byte: who wrote last, who read last, and in which barrier epoch. Two accesses of different
 * threads are ordered only when a barrier that names the memory lies between them; threads of
 * different threadgroups of one dispatch are never ordered. What one of them stores by an atomic
 * another may load by one, if both have a fence between that and how they came to know of each
 * other: the first after its store, the second before its load. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    PAGE_BYTES = 4096,
    ARENA_BYTES = 128 * 1024, /* more than the limit: a kernel over it is reported, then runs */
    SLOT_GAP = 64,
    SLOTS_MAX = 128,
    NAME_BYTES = 48,
};

/* `reader` of a cell: a thread, all of one simdgroup, or more than that. */
enum { READERS_OF_SIMDGROUP = 0x8000, READERS_MANY = 0xffff };

struct shadow {
    uint32_t write_epoch, read_epoch; /* 0: never */
    uint32_t first_read_epoch;        /* of the last dispatch that read */
    uint16_t writer, write_sync;
    uint16_t reader, read_sync;
    bool write_was_atomic, fenced; /* fenced: since the write, by its threadgroup */
};

struct region {
    unsigned char *base;
    uint64_t bytes;
    char name[NAME_BYTES];
    struct shadow *shadow; /* [bytes], made at the first checked access */
    bool read_only, owned;
};

struct slot {
    int *index; /* the variable's static, or null for an argument */
    uint32_t offset, bytes;
    char name[NAME_BYTES];
};

static struct region *regions;
static int region_count, last_region;
static unsigned char *arena; /* [ARENA_BYTES] */
static struct shadow arena_shadow[ARENA_BYTES];
static uint8_t arena_owner[ARENA_BYTES]; /* slot + 1, 0 in a gap */
static struct slot slots[SLOTS_MAX];
static int slot_count;
static uint32_t arena_end, threadgroup_bytes;
static struct shadow **unfenced; /* cells that this threadgroup stored since its last fence */
static int unfenced_count, unfenced_room;
static bool has_fenced; /* this threadgroup, since its last update of an atomic */

/* ---- buffers ------------------------------------------------------------------------------ */

static void memory_add_region(void *base, uint64_t bytes, const char *name, bool owned)
{
    regions = realloc(regions, (size_t)(region_count + 1) * sizeof *regions);
    if (!regions)
        abort();
    struct region *r = &regions[region_count++];
    *r = (struct region){.base = base, .bytes = bytes, .owned = owned};
    snprintf(r->name, sizeof r->name, "%s", name);
}

void *emu_buffer_new(uint64_t bytes, const char *name)
{
    uint64_t body = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    unsigned char *pages = mmap(NULL, body + 2 * PAGE_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        abort();
    mprotect(pages, PAGE_BYTES, PROT_NONE);
    mprotect(pages + PAGE_BYTES + body, PAGE_BYTES, PROT_NONE);
    /* Its end touches the unmapped page, as far as the alignment of vectors allows. */
    unsigned char *base = pages + PAGE_BYTES + ((body - bytes) & ~15ull);
    memset(base, 0xCD, bytes);
    memory_add_region(base, bytes, name, true);
    return base;
}

void emu_buffer_adopt(void *address, uint64_t bytes, const char *name)
{
    memory_add_region(address, bytes, name, false);
}

void emu_buffer_free(void *buffer)
{
    for (int i = 0; i < region_count; i++) {
        struct region *r = &regions[i];
        if (r->base != buffer)
            continue;
        free(r->shadow);
        if (r->owned) {
            uint64_t body = (r->bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
            uintptr_t first = (uintptr_t)buffer & ~(uintptr_t)(PAGE_BYTES - 1);
            munmap((void *)(first - PAGE_BYTES), body + 2 * PAGE_BYTES);
        }
        regions[i] = regions[--region_count];
        last_region = 0;
        return;
    }
}

static struct region *memory_find_region(uintptr_t address)
{
    for (int k = -1; k < region_count; k++) {
        int i = k < 0 ? last_region : k;
        if (i < region_count && address - (uintptr_t)regions[i].base < regions[i].bytes) {
            last_region = i;
            return &regions[i];
        }
    }
    return NULL;
}

/* The region in whose unmapped surroundings the address lies. */
static const struct region *memory_find_near(uintptr_t address)
{
    for (int i = 0; i < region_count; i++) {
        uintptr_t base = (uintptr_t)regions[i].base;
        if (address + PAGE_BYTES > base && address < base + regions[i].bytes + PAGE_BYTES)
            return &regions[i];
    }
    return NULL;
}

uint64_t emu_buffer_left(const void *address)
{
    const struct region *r = memory_find_region((uintptr_t)address);
    return r ? r->bytes - ((uintptr_t)address - (uintptr_t)r->base) : 0;
}

bool memory_describe(const void *address, char *out, size_t out_bytes)
{
    const struct region *r = memory_find_near((uintptr_t)address);
    if (r)
        snprintf(out, out_bytes, "byte %ld of %s (%lu bytes)",
                 (long)((uintptr_t)address - (uintptr_t)r->base), r->name, (unsigned long)r->bytes);
    return r != NULL;
}

void memory_set_read_only(const struct emu_bindings *bindings, const struct kernel *kernel)
{
    for (int writable = 0; writable < 2; writable++) {
        for (int i = 0; i < kernel->parameter_count; i++) {
            const struct emu_parameter *p = &kernel->parameters[i];
            if (p->kind != EMU_ARG_BUFFER || p->is_const == writable)
                continue;
            struct region *r = memory_find_region((uintptr_t)bindings->buffer[p->index]);
            if (r)
                r->read_only = !writable;
        }
    }
}

/* ---- threadgroup memory ------------------------------------------------------------------- */

static uint32_t memory_place(int *index, uint32_t bytes, uint32_t alignment, const char *name)
{
    uint32_t align = alignment < 16 ? 16 : alignment;
    uint32_t offset = (arena_end + align - 1) / align * align;
    uint32_t before = threadgroup_bytes;
    threadgroup_bytes += (bytes + 15) / 16 * 16;
    if (threadgroup_bytes > EMU_THREADGROUP_BYTES_MAX && before <= EMU_THREADGROUP_BYTES_MAX)
        report_add("limit", NULL, "kernel %s: %u bytes of threadgroup memory with %s, the limit is "
                   "%d", machine.kernel->name, threadgroup_bytes, name, EMU_THREADGROUP_BYTES_MAX);
    if (slot_count == SLOTS_MAX || offset + bytes + SLOT_GAP > ARENA_BYTES) {
        report_add("limit", NULL, "kernel %s: %s does not fit the emulator's threadgroup memory",
                   machine.kernel->name, name);
        siglongjmp(machine.escape, 1);
    }
    struct slot *s = &slots[slot_count++];
    *s = (struct slot){.index = index, .offset = offset, .bytes = bytes};
    snprintf(s->name, sizeof s->name, "%s", name);
    memset(arena_owner + offset, slot_count, bytes);
    arena_end = offset + bytes + SLOT_GAP;
    return offset;
}

void *memory_place_argument(int index, uint32_t bytes)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "[[threadgroup(%d)]]", index);
    return arena + memory_place(NULL, bytes, 16, name);
}

void *emu_threadgroup_variable(int *slot, emu_size bytes, emu_size alignment, const char *name)
{
    if (*slot < 0) {
        bool in_kernel = machine.in_kernel;
        machine.in_kernel = false;
        *slot = (int)memory_place(slot, (uint32_t)bytes, (uint32_t)alignment, name);
        machine.in_kernel = in_kernel;
    }
    return arena + *slot;
}

void memory_begin_dispatch(void)
{
    if (!arena) {
        arena = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (arena == MAP_FAILED)
            abort();
    }
    for (int i = 0; i < slot_count; i++)
        if (slots[i].index)
            *slots[i].index = -1;
    slot_count = 0;
    arena_end = 0;
    threadgroup_bytes = 0;
    memset(arena_owner, 0, sizeof arena_owner);
    for (int i = 0; i < region_count; i++)
        regions[i].read_only = false;
    machine.device.dispatch_start = machine.device.now + 1;
    /* Threadgroup memory does not outlive its threadgroup: nothing is unordered across them. */
    machine.threadgroup.dispatch_start = UINT32_MAX;
}

void memory_begin_threadgroup(void)
{
    machine.device.threadgroup_start = ++machine.device.now;
    machine.threadgroup.threadgroup_start = ++machine.threadgroup.now;
    /* 0xFF bytes are a NaN in every float type, so that what was not written shows. */
    memset(arena, 0xFF, ARENA_BYTES);
    unfenced_count = 0;
    has_fenced = false;
}

uint32_t emu_threadgroup_bytes_used(void)
{
    return threadgroup_bytes;
}

/* ---- shadow cells ------------------------------------------------------------------------- */

struct access {
    bool is_write, is_atomic;
    uint16_t thread, simdgroup, sync;
    const struct epochs *epochs;
    const void *site;
    const char *name;
    uint64_t offset;
};

/* Whether an earlier access by `who` lacks an order with this one. */
static bool memory_is_unordered(const struct access *a, uint32_t epoch, uint16_t who, uint16_t sync)
{
    if (epoch < a->epochs->threadgroup_start)
        return epoch >= a->epochs->dispatch_start; /* another threadgroup of this dispatch */
    if (epoch != a->epochs->now || who == a->thread)
        return false;
    if (who == READERS_MANY)
        return true;
    uint16_t simdgroup = who & READERS_OF_SIMDGROUP ? who & ~READERS_OF_SIMDGROUP
                                                    : who / EMU_SIMD_WIDTH;
    return simdgroup != a->simdgroup || sync == a->sync;
}

static void memory_report_race(const struct access *a, const char *earlier, uint32_t epoch,
                               uint16_t who)
{
    const char *now = a->is_write ? "write" : "read";
    if (epoch < a->epochs->threadgroup_start)
        report_add("race", a->site, "%s of byte %lu of %s, %s by another threadgroup", now,
                   (unsigned long)a->offset, a->name, earlier);
    else if (who & READERS_OF_SIMDGROUP)
        report_add("race", a->site, "%s of byte %lu of %s, %s by several threads with no barrier "
                   "between", now, (unsigned long)a->offset, a->name, earlier);
    else
        report_add("race", a->site, "%s of byte %lu of %s, %s by thread %u with no barrier between",
                   now, (unsigned long)a->offset, a->name, earlier, who);
}

static void memory_note_read(struct shadow *c, const struct access *a)
{
    if (c->read_epoch == a->epochs->now && c->reader != a->thread) {
        uint16_t group_readers = READERS_OF_SIMDGROUP | a->simdgroup;
        bool same_simdgroup = c->reader == group_readers ||
                              (!(c->reader & READERS_OF_SIMDGROUP) &&
                               c->reader / EMU_SIMD_WIDTH == a->simdgroup);
        c->reader = same_simdgroup ? group_readers : READERS_MANY;
    } else {
        c->reader = a->thread;
    }
    c->read_epoch = a->epochs->now;
    c->read_sync = a->sync;
    if (c->first_read_epoch < a->epochs->dispatch_start)
        c->first_read_epoch = a->epochs->now;
}

static void memory_check_cell(struct shadow *c, const struct access *a)
{
    if (c->write_epoch && !(a->is_atomic && c->write_was_atomic) &&
        memory_is_unordered(a, c->write_epoch, c->writer, c->write_sync))
        memory_report_race(a, "written", c->write_epoch, c->writer);
    if (a->is_write && c->read_epoch) {
        bool by_other_group = c->first_read_epoch >= a->epochs->dispatch_start &&
                              c->first_read_epoch < a->epochs->threadgroup_start;
        if (by_other_group)
            memory_report_race(a, "read", c->first_read_epoch, c->reader);
        else if (memory_is_unordered(a, c->read_epoch, c->reader, c->read_sync))
            memory_report_race(a, "read", c->read_epoch, c->reader);
    }
    if (a->is_write) {
        c->write_epoch = a->epochs->now;
        c->writer = a->thread;
        c->write_sync = a->sync;
        c->write_was_atomic = a->is_atomic;
    } else if (!a->is_atomic) {
        memory_note_read(c, a);
    }
}

/* ---- atomics between threadgroups --------------------------------------------------------- */

static void memory_note_store(struct shadow *c)
{
    c->fenced = false;
    if (unfenced_count == unfenced_room) {
        unfenced_room = unfenced_room ? 2 * unfenced_room : 1024;
        unfenced = realloc(unfenced, (size_t)unfenced_room * sizeof *unfenced);
        if (!unfenced)
            abort();
    }
    unfenced[unfenced_count++] = c;
}

void emu_device_fence(void)
{
    for (int i = 0; i < unfenced_count; i++)
        unfenced[i]->fenced = true;
    unfenced_count = 0;
    has_fenced = true;
}

void memory_note_update(const void *address)
{
    if ((uintptr_t)address - (uintptr_t)arena < ARENA_BYTES)
        return;
    has_fenced = false;
    unfenced_count = 0; /* a fence that comes now comes too late for them */
}

static void memory_check_order(const struct shadow *c, const struct access *a)
{
    bool by_other_group = c->write_epoch >= a->epochs->dispatch_start &&
                          c->write_epoch < a->epochs->threadgroup_start;
    if (by_other_group && c->write_was_atomic && !(c->fenced && has_fenced))
        report_add("order", a->site, "atomic load of byte %lu of %s, which another threadgroup "
                   "stored, with no fence %s", (unsigned long)a->offset, a->name,
                   c->fenced ? "before it" : "after the store");
}

/* ---- accesses ----------------------------------------------------------------------------- */

static void memory_report_gap(uint32_t offset, size_t bytes, bool is_write, const void *site)
{
    const struct slot *before = NULL;
    for (int i = 0; i < slot_count; i++)
        if (slots[i].offset <= offset && (!before || slots[i].offset > before->offset))
            before = &slots[i];
    report_add("bounds", site, "%s of %zu bytes at byte %u of %s (%u bytes)",
               is_write ? "write" : "read", bytes, before ? offset - before->offset : offset,
               before ? before->name : "threadgroup memory", before ? before->bytes : 0);
}

static void memory_access_threadgroup(struct access *a, uint32_t offset, size_t bytes)
{
    const struct fiber *f = machine.current;
    a->epochs = &machine.threadgroup;
    a->sync = f->simdgroup->threadgroup_sync;
    for (uint32_t o = offset; o < offset + bytes; o++) {
        if (o >= ARENA_BYTES || !arena_owner[o]) {
            memory_report_gap(o, bytes, a->is_write, a->site);
            return;
        }
        const struct slot *s = &slots[arena_owner[o] - 1];
        struct shadow *c = &arena_shadow[o];
        a->name = s->name;
        a->offset = o - s->offset;
        if (!a->is_write && c->write_epoch < machine.threadgroup.threadgroup_start) {
            report_add("uninitialised", a->site, "read of byte %lu of %s before any write",
                       (unsigned long)a->offset, a->name);
            c->write_epoch = machine.threadgroup.threadgroup_start;
            c->writer = a->thread;
        }
        memory_check_cell(c, a);
    }
}

static void memory_access_device(struct access *a, struct region *r, uint64_t offset, size_t bytes)
{
    a->name = r->name;
    a->offset = offset;
    if (offset + bytes > r->bytes) {
        report_add("bounds", a->site, "%s of %zu bytes at byte %lu of %s (%lu bytes)",
                   a->is_write ? "write" : "read", bytes, (unsigned long)offset, r->name,
                   (unsigned long)r->bytes);
        return;
    }
    if (r->read_only) {
        if (a->is_write)
            report_add("read-only", a->site, "write to byte %lu of %s, which is bound as const",
                       (unsigned long)offset, r->name);
        return;
    }
    if (!r->shadow) {
        r->shadow = calloc(r->bytes, sizeof *r->shadow);
        if (!r->shadow)
            abort();
    }
    a->epochs = &machine.device;
    a->sync = machine.current->simdgroup->device_sync;
    for (size_t i = 0; i < bytes; i++) {
        a->offset = offset + i;
        if (a->is_atomic && !a->is_write)
            memory_check_order(&r->shadow[offset + i], a);
        memory_check_cell(&r->shadow[offset + i], a);
        if (a->is_atomic && a->is_write)
            memory_note_store(&r->shadow[offset + i]);
    }
}

/* What a kernel reads besides its memory: its library's constants, and what it is told. */
static bool memory_is_own(uintptr_t p)
{
    const struct library *l = machine.kernel->library;
    return (p >= l->low && p < l->high) || p - (uintptr_t)&machine < sizeof machine ||
           p - (uintptr_t)machine.fibers < EMU_THREADS_MAX * sizeof *machine.fibers;
}

void memory_access(const void *address, size_t bytes, bool is_write, bool is_atomic,
                   const void *site)
{
    if (!machine.in_kernel)
        return;
    machine.accesses++;
    const struct fiber *f = machine.current;
    uintptr_t p = (uintptr_t)address;
    if (p - (uintptr_t)f->stack < FIBER_STACK_BYTES)
        return;
    struct access a = {
        .is_write = is_write,
        .is_atomic = is_atomic,
        .thread = (uint16_t)f->thread.index_in_threadgroup,
        .simdgroup = (uint16_t)f->thread.simdgroup,
        .site = site,
    };
    machine.in_kernel = false;
    struct region *r;
    if (p - (uintptr_t)arena < ARENA_BYTES)
        memory_access_threadgroup(&a, (uint32_t)(p - (uintptr_t)arena), bytes);
    else if ((r = memory_find_region(p)))
        memory_access_device(&a, r, p - (uintptr_t)r->base, bytes);
    else if (!memory_is_own(p)) {
        char where[128];
        if (!memory_describe(address, where, sizeof where))
            snprintf(where, sizeof where, "address %p, in no buffer", address);
        report_add("bounds", site, "%s of %zu bytes at %s", is_write ? "write" : "read", bytes,
                   where);
    }
    machine.in_kernel = true;
}

void emu_touch(const void *address, emu_size bytes, int is_write)
{
    struct fiber *f = machine.current;
    bool in_kernel = machine.in_kernel;
    if (!f || !machine.kernel)
        return;
    machine.in_kernel = true;
    memory_access(address, bytes, is_write, false, f->site);
    machine.in_kernel = in_kernel;
}
