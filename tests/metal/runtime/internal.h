/* What the parts of the runtime share. One struct machine holds all that a running dispatch is;
 * it is not re-entrant, and `in_kernel` is true only while a fiber executes kernel code: the
 * accesses of the runtime itself, and of collective bodies, are not checked. */
#ifndef EMU_INTERNAL_H
#define EMU_INTERNAL_H

#include "emu.h"

#include <setjmp.h>
#include <stddef.h>

enum { FIBER_STACK_BYTES = 128 * 1024, SIMDGROUPS_MAX = EMU_THREADS_MAX / EMU_SIMD_WIDTH };

enum fiber_state { FIBER_READY, FIBER_AT_SIMD, FIBER_AT_BARRIER, FIBER_AT_GROUP, FIBER_DONE };

struct simdgroup;

struct fiber {
    void *stack_pointer;
    char *stack; /* lowest usable byte; the page below it is unmapped */
    enum fiber_state state;
    const void *site; /* where it waits */
    void *in, *out;   /* of the collective it waits in */
    emu_collective body;
    int flags;        /* mem_flags of the barrier it waits in */
    unsigned threads; /* that a group collective wants */
    struct simdgroup *simdgroup;
    struct emu_thread thread;
};

struct simdgroup {
    struct fiber *lanes; /* [count] */
    unsigned count, live;
    unsigned waiting;  /* lanes in FIBER_AT_SIMD */
    const void *site;  /* of the first of them */
    unsigned agreeing; /* lanes that wait at that site */
    /* Raised by each simdgroup_barrier that names the memory. */
    uint16_t device_sync, threadgroup_sync;
};

/* Barrier epochs of a kind of memory. They only grow, over dispatches too, so that what a shadow
 * cell remembers of an earlier dispatch or threadgroup is told apart by its number. */
struct epochs {
    uint32_t now;
    uint32_t threadgroup_start, dispatch_start;
};

struct kernel {
    const char *name;
    emu_entry entry;
    const struct emu_parameter *parameters;
    int parameter_count, threads_max;
    struct library *library;
};

struct library {
    char *path;
    void *handle;
    uintptr_t low, high; /* where its segments lie */
    struct kernel *kernels;
    int kernel_count;
};

struct machine {
    const struct kernel *kernel;
    struct emu_bindings bindings;
    struct fiber *fibers; /* [EMU_THREADS_MAX] */
    struct simdgroup simdgroups[SIMDGROUPS_MAX];
    unsigned fiber_count, simdgroup_count, live;
    struct fiber *current; /* null outside fibers */
    void *scheduler_stack_pointer;
    bool in_kernel;
    enum emu_order order;
    uint32_t random_state;
    struct epochs device, threadgroup;
    uint64_t switches, accesses;
    sigjmp_buf escape; /* out of a fault in kernel code */
};

extern struct machine machine;

/* fiber.c */
void fiber_prepare(unsigned i, const struct emu_thread *thread);
bool fiber_run_threadgroup(void); /* false: threads are stuck */
uint32_t fiber_random(void);

/* memory.c */
void memory_begin_dispatch(void);
void memory_begin_threadgroup(void);
void *memory_place_argument(int index, uint32_t bytes);
void memory_access(const void *address, size_t bytes, bool is_write, bool is_atomic,
                   const void *site);
/* An atomic that reads and writes, before its access: by it threadgroups learn of each other. */
void memory_note_update(const void *address);
/* Marks the buffers that the dispatch may only read. */
void memory_set_read_only(const struct emu_bindings *bindings, const struct kernel *kernel);
bool memory_describe(const void *address, char *out, size_t out_bytes);

/* report.c */
void report_begin(void);
__attribute__((format(printf, 3, 4))) void report_add(const char *kind, const void *site,
                                                      const char *format, ...);
int report_count(void);

/* library.c: the library that holds a machine address, or null */
const struct library *library_of(const void *address);

#endif
