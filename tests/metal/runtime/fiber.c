/* One fiber a GPU thread: stacks, the scheduler, and the places where threads wait for each other.
 *
 * A fiber runs until it waits or ends. A simdgroup operation completes when every live lane of the
 * simdgroup waits at the same call; a threadgroup barrier when every live thread does. What the
 * language leaves undefined - lanes at different calls, threads that returned before a barrier -
 * is reported, and the threads that did arrive go on, so that one mistake gives one finding. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if !defined(__x86_64__)
#error "fiber_switch is written for x86-64 only"
#endif

/* Saves the callee-saved registers on the running stack, leaves its pointer in *save, and resumes
 * the stack `to`. SSE control words are not switched: all fibers share the dispatch's. */
void fiber_switch(void **save, void *to);
__asm__(".text\n"
        ".globl fiber_switch\n"
        "fiber_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n");

enum { SAVED_REGISTERS = 6, PAGE_BYTES = 4096 };

uint32_t fiber_random(void)
{
    uint32_t x = machine.random_state;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return machine.random_state = x;
}

/* ---- running ------------------------------------------------------------------------------ */

static void fiber_yield(void)
{
    machine.in_kernel = false;
    fiber_switch(&machine.current->stack_pointer, machine.scheduler_stack_pointer);
    machine.in_kernel = true;
}

static void fiber_main(void)
{
    struct fiber *f = machine.current;
    machine.in_kernel = true;
    machine.kernel->entry(&f->thread);
    machine.in_kernel = false;
    f->state = FIBER_DONE;
    f->simdgroup->live--;
    machine.live--;
    fiber_yield();
    abort(); /* an ended fiber is never resumed */
}

void fiber_prepare(unsigned i, const struct emu_thread *thread)
{
    struct fiber *f = &machine.fibers[i];
    char *stack = f->stack;
    if (!stack) {
        char *pages = mmap(NULL, FIBER_STACK_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED)
            abort();
        mprotect(pages, PAGE_BYTES, PROT_NONE);
        stack = pages + PAGE_BYTES;
    }
    *f = (struct fiber){.stack = stack, .thread = *thread};
    f->simdgroup = &machine.simdgroups[i / EMU_SIMD_WIDTH];
    /* The first switch pops zeroed registers and "returns" into fiber_main, which must see the
     * stack as after a call: 8 bytes off a multiple of 16. */
    void **top = (void **)(stack + FIBER_STACK_BYTES - 64);
    *--top = NULL;
    *--top = (void *)fiber_main;
    for (int r = 0; r < SAVED_REGISTERS; r++)
        *--top = NULL;
    f->stack_pointer = top;
}

/* ---- waiting in a simdgroup --------------------------------------------------------------- */

/* Completes what the lanes waiting at `site` wait for. */
static void fiber_finish_simd(struct simdgroup *g, const void *site)
{
    void *in[EMU_SIMD_WIDTH] = {0}, *out[EMU_SIMD_WIDTH] = {0};
    struct fiber *any = NULL;
    for (unsigned i = 0; i < g->count; i++) {
        struct fiber *f = &g->lanes[i];
        if (f->state != FIBER_AT_SIMD || f->site != site)
            continue;
        in[i] = f->in;
        out[i] = f->out;
        any = f;
        f->state = FIBER_READY;
        g->waiting--;
    }
    if (any->body) {
        any->body(in, out, EMU_SIMD_WIDTH);
    } else {
        g->device_sync += (any->flags & EMU_MEM_DEVICE) != 0;
        g->threadgroup_sync += (any->flags & EMU_MEM_THREADGROUP) != 0;
    }
    g->site = NULL;
    g->agreeing = 0;
    for (unsigned i = 0; i < g->count; i++) {
        if (g->lanes[i].state != FIBER_AT_SIMD)
            continue;
        if (!g->site)
            g->site = g->lanes[i].site;
        g->agreeing += g->lanes[i].site == g->site;
    }
}

static void fiber_wait_simd(const void *site, void *in, void *out, emu_collective body, int flags)
{
    struct fiber *f = machine.current;
    struct simdgroup *g = f->simdgroup;
    f->site = site;
    f->in = in;
    f->out = out;
    f->body = body;
    f->flags = flags;
    f->state = FIBER_AT_SIMD;
    if (g->waiting++ == 0) {
        g->site = site;
        g->agreeing = 0;
    }
    g->agreeing += site == g->site;
    if (g->agreeing == g->live) {
        machine.in_kernel = false;
        if (g->live != g->count)
            report_add("divergence", site, "%u lanes of the simdgroup returned before this "
                       "operation", g->count - g->live);
        fiber_finish_simd(g, site);
        machine.in_kernel = true;
    } else {
        fiber_yield();
    }
}

void emu_simd_collective(const void *site, void *in, void *out, emu_collective body)
{
    fiber_wait_simd(site, in, out, body, 0);
}

void emu_simdgroup_barrier(int flags, const void *site)
{
    fiber_wait_simd(site, NULL, NULL, NULL, flags);
}

/* ---- waiting in the threadgroup ----------------------------------------------------------- */

void emu_threadgroup_barrier(int flags, const void *site)
{
    struct fiber *f = machine.current;
    f->site = site;
    f->flags = flags;
    f->state = FIBER_AT_BARRIER;
    fiber_yield();
}

void emu_group_collective(const void *site, void *in, void *out, emu_collective body,
                          unsigned threads)
{
    struct fiber *f = machine.current;
    f->site = site;
    f->in = in;
    f->out = out;
    f->body = body;
    f->threads = threads;
    f->state = FIBER_AT_GROUP;
    fiber_yield();
}

static unsigned fiber_count_in(enum fiber_state state)
{
    unsigned n = 0;
    for (unsigned i = 0; i < machine.fiber_count; i++)
        n += machine.fibers[i].state == state;
    return n;
}

/* Every live thread waits in `state`: reports what differs between them, and frees them. Returns
 * the first of them. */
static struct fiber *fiber_release_all(enum fiber_state state, int *flags)
{
    struct fiber *first = NULL;
    bool told = false;
    *flags = 0;
    for (unsigned i = 0; i < machine.fiber_count; i++) {
        struct fiber *f = &machine.fibers[i];
        if (f->state != state)
            continue;
        if (!first)
            first = f;
        machine.current = f;
        if (f->site != first->site && !told) {
            report_add("divergence", f->site, "threads of one threadgroup wait at different calls");
            report_add("divergence", first->site, "the other call at which threads wait");
            told = true;
        }
        *flags |= f->flags;
        f->state = FIBER_READY;
    }
    if (machine.live != machine.fiber_count) {
        machine.current = first;
        report_add("divergence", first->site, "%u of %u threads returned before this barrier",
                   machine.fiber_count - machine.live, machine.fiber_count);
    }
    machine.current = NULL;
    return first;
}

static void fiber_finish_barrier(void)
{
    int flags;
    fiber_release_all(FIBER_AT_BARRIER, &flags);
    machine.device.now += (flags & EMU_MEM_DEVICE) != 0;
    machine.threadgroup.now += (flags & EMU_MEM_THREADGROUP) != 0;
}

static void fiber_finish_group(void)
{
    static void *in[EMU_THREADS_MAX], *out[EMU_THREADS_MAX];
    for (unsigned i = 0; i < machine.fiber_count; i++) {
        const struct fiber *f = &machine.fibers[i];
        in[i] = f->state == FIBER_AT_GROUP ? f->in : NULL;
        out[i] = f->out;
    }
    int flags;
    struct fiber *first = fiber_release_all(FIBER_AT_GROUP, &flags);
    machine.current = first;
    if (first->threads != machine.fiber_count)
        report_add("violation", first->site, "the operation is for %u threads, the threadgroup has "
                   "%u", first->threads, machine.fiber_count);
    else if (machine.live == machine.fiber_count)
        first->body(in, out, first->threads);
    machine.current = NULL;
}

/* ---- the scheduler ------------------------------------------------------------------------ */

/* The i-th of n in the order of this dispatch. */
static unsigned fiber_pick(unsigned i, unsigned n, unsigned start)
{
    if (machine.order == EMU_REVERSE)
        return n - 1 - i;
    return (i + start) % n;
}

static unsigned fiber_random_start(unsigned n)
{
    return machine.order == EMU_RANDOM ? fiber_random() % n : 0;
}

/* Lets each ready lane run once; returns whether any did. A fiber that ends can leave the others
 * complete without it. */
static bool fiber_run_simdgroup(struct simdgroup *g)
{
    bool any = false;
    unsigned start = fiber_random_start(g->count);
    for (unsigned i = 0; i < g->count; i++) {
        struct fiber *f = &g->lanes[fiber_pick(i, g->count, start)];
        if (f->state != FIBER_READY)
            continue;
        any = true;
        machine.switches++;
        machine.current = f;
        fiber_switch(&machine.scheduler_stack_pointer, f->stack_pointer);
        machine.current = NULL;
    }
    if (g->live && g->agreeing == g->live && g->waiting == g->live) {
        report_add("divergence", g->site, "%u lanes of the simdgroup returned before this "
                   "operation", g->count - g->live);
        fiber_finish_simd(g, g->site);
        any = true;
    }
    return any;
}

static bool fiber_run_ready(void)
{
    bool progress = false;
    unsigned n = machine.simdgroup_count, start = fiber_random_start(n);
    for (unsigned i = 0; i < n; i++) {
        struct simdgroup *g = &machine.simdgroups[fiber_pick(i, n, start)];
        while (fiber_run_simdgroup(g))
            progress = true;
    }
    return progress;
}

/* Nobody can run: lanes of a simdgroup wait at different places. Reports it and lets those at one
 * place go on without the rest, as hardware with a partial mask would. */
static bool fiber_break_simd_deadlock(void)
{
    for (unsigned k = 0; k < machine.simdgroup_count; k++) {
        struct simdgroup *g = &machine.simdgroups[k];
        if (!g->waiting)
            continue;
        const struct fiber *other = NULL;
        for (unsigned i = 0; i < g->count; i++) {
            const struct fiber *f = &g->lanes[i];
            if (f->state != FIBER_DONE && (f->state != FIBER_AT_SIMD || f->site != g->site))
                other = f;
            if (f->state == FIBER_AT_SIMD && f->site == g->site)
                machine.current = &g->lanes[i];
        }
        report_add("divergence", g->site, "%u of %u lanes are at this simdgroup operation, others "
                   "are not", g->agreeing, g->count);
        if (other)
            report_add("divergence", other->site, "where other lanes of the simdgroup wait (%s)",
                       other->state == FIBER_AT_BARRIER ? "a threadgroup barrier"
                                                        : "another simdgroup operation");
        machine.current = NULL;
        fiber_finish_simd(g, g->site);
        return true;
    }
    return false;
}

static void fiber_report_stuck(void)
{
    for (unsigned i = 0; i < machine.fiber_count; i++) {
        struct fiber *f = &machine.fibers[i];
        if (f->state != FIBER_AT_BARRIER && f->state != FIBER_AT_GROUP)
            continue;
        machine.current = f;
        report_add("divergence", f->site, "some of the %u live threads wait here, the others never "
                   "come", machine.live);
        machine.current = NULL;
        return;
    }
}

bool fiber_run_threadgroup(void)
{
    unsigned n = machine.fiber_count;
    machine.live = n;
    machine.simdgroup_count = (n + EMU_SIMD_WIDTH - 1) / EMU_SIMD_WIDTH;
    for (unsigned k = 0; k < machine.simdgroup_count; k++) {
        unsigned first = k * EMU_SIMD_WIDTH;
        unsigned count = n - first < EMU_SIMD_WIDTH ? n - first : EMU_SIMD_WIDTH;
        machine.simdgroups[k] =
            (struct simdgroup){.lanes = &machine.fibers[first], .count = count, .live = count};
    }
    while (machine.live) {
        bool progress = fiber_run_ready();
        if (!machine.live)
            break;
        if (fiber_count_in(FIBER_AT_BARRIER) == machine.live) {
            fiber_finish_barrier();
        } else if (fiber_count_in(FIBER_AT_GROUP) == machine.live) {
            fiber_finish_group();
        } else if (!progress && !fiber_break_simd_deadlock()) {
            fiber_report_stuck();
            return false;
        }
    }
    return true;
}

/* ---- what a thread may ask ---------------------------------------------------------------- */

const void *emu_site(void)
{
    return __builtin_return_address(0);
}

unsigned emu_lane(void)
{
    return machine.current->thread.lane;
}

unsigned emu_index_in_threadgroup(void)
{
    return machine.current->thread.index_in_threadgroup;
}

unsigned emu_first_lane(void)
{
    if (machine.order == EMU_FORWARD)
        return 0;
    return machine.order == EMU_REVERSE ? EMU_SIMD_WIDTH - 1 : fiber_random() % EMU_SIMD_WIDTH;
}

void emu_violation(const char *message)
{
    const struct fiber *f = machine.current;
    report_add("violation", f && f->site ? f->site : __builtin_return_address(0), "%s", message);
}
