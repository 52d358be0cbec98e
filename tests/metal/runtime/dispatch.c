/* A dispatch: checks what is bound, runs the threadgroups one after the other, and survives what
 * kernel code can do to the process (a fault in an unmapped page, an endless loop). */
#include "internal.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <xmmintrin.h>

enum { MXCSR_FLUSH_TO_ZERO = 0x8000, MXCSR_DENORMALS_ARE_ZERO = 0x0040 };
enum { SIGNAL_STACK_BYTES = 64 * 1024 };

struct machine machine;

/* ---- faults ------------------------------------------------------------------------------- */

static void dispatch_on_signal(int signal, siginfo_t *info, void *context)
{
    (void)context;
    if (!machine.current)
        abort(); /* a bug of the emulator itself */
    machine.in_kernel = false;
    char where[128];
    if (signal == SIGALRM)
        report_add("timeout", NULL, "kernel %s did not end in time", machine.kernel->name);
    else if (signal == SIGILL) /* -fsanitize=local-bounds: through a pointer, after inlining */
        report_add("bounds", (const char *)info->si_addr + 1, "outside of an array of the thread");
    else if (signal == SIGFPE)
        report_add("undefined", NULL, "kernel %s: integer division by zero", machine.kernel->name);
    else if (memory_describe(info->si_addr, where, sizeof where))
        report_add("bounds", NULL, "kernel %s: fault at %s", machine.kernel->name, where);
    else
        report_add("bounds", NULL, "kernel %s: fault at address %p", machine.kernel->name,
                   info->si_addr);
    siglongjmp(machine.escape, 1);
}

static const int caught_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM};
enum { CAUGHT_SIGNALS = sizeof caught_signals / sizeof *caught_signals };

struct guard {
    struct sigaction old[CAUGHT_SIGNALS];
    stack_t old_stack;
    timer_t timer;
    bool has_timer;
    unsigned mxcsr;
};

static void dispatch_guard_begin(struct guard *g, const struct emu_dispatch *d)
{
    static char *signal_stack;
    if (!signal_stack && !(signal_stack = malloc(SIGNAL_STACK_BYTES)))
        abort();
    sigaltstack(&(stack_t){.ss_sp = signal_stack, .ss_size = SIGNAL_STACK_BYTES}, &g->old_stack);
    struct sigaction action = {.sa_sigaction = dispatch_on_signal,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK};
    for (int i = 0; i < CAUGHT_SIGNALS; i++)
        sigaction(caught_signals[i], &action, &g->old[i]);
    g->has_timer = d->timeout_ms != 0;
    if (g->has_timer) {
        struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGALRM};
        event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
        struct itimerspec when = {.it_value = {.tv_sec = d->timeout_ms / 1000,
                                               .tv_nsec = d->timeout_ms % 1000 * 1000000L}};
        /* CPU time of this thread: a busy machine is not an endless loop. */
        g->has_timer = !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &g->timer) &&
                       !timer_settime(g->timer, 0, &when, NULL);
    }
    g->mxcsr = _mm_getcsr();
    if (d->flush_to_zero)
        _mm_setcsr(g->mxcsr | MXCSR_FLUSH_TO_ZERO | MXCSR_DENORMALS_ARE_ZERO);
}

static void dispatch_guard_end(struct guard *g)
{
    _mm_setcsr(g->mxcsr);
    if (g->has_timer)
        timer_delete(g->timer);
    for (int i = 0; i < CAUGHT_SIGNALS; i++)
        sigaction(caught_signals[i], &g->old[i], NULL);
    sigaltstack(&g->old_stack, NULL);
}

/* ---- bindings ----------------------------------------------------------------------------- */

static void dispatch_check_buffer(const struct emu_parameter *p, const void *bound)
{
    if (!bound) {
        if (!p->optional)
            report_add("binding", NULL, "kernel %s: nothing is bound at buffer index %d",
                       machine.kernel->name, p->index);
        return;
    }
    uint64_t left = emu_buffer_left(bound);
    if (!left)
        report_add("binding", NULL, "kernel %s: index %d lies in no buffer", machine.kernel->name,
                   p->index);
    else if (p->is_reference && left < p->bytes)
        report_add("binding", NULL, "kernel %s: index %d needs %lu bytes, %lu are bound",
                   machine.kernel->name, p->index, (unsigned long)p->bytes, (unsigned long)left);
    if ((uintptr_t)bound % p->alignment)
        report_add("binding", NULL, "kernel %s: the offset at index %d is not a multiple of %lu",
                   machine.kernel->name, p->index, (unsigned long)p->alignment);
}

/* Places what is bound; false when the dispatch cannot run. */
static bool dispatch_bind(const struct emu_dispatch *d)
{
    struct emu_bindings *bindings = &machine.bindings;
    const struct kernel *k = machine.kernel;
    memcpy(bindings->buffer, d->buffer, sizeof bindings->buffer);
    for (int i = 0; i < EMU_BUFFERS_MAX; i++)
        bindings->threadgroup[i] =
            d->threadgroup_bytes[i] ? memory_place_argument(i, d->threadgroup_bytes[i]) : NULL;
    for (int i = 0; i < k->parameter_count; i++) {
        const struct emu_parameter *p = &k->parameters[i];
        if (p->kind == EMU_ARG_BUFFER)
            dispatch_check_buffer(p, d->buffer[p->index]);
        if (p->kind == EMU_ARG_THREADGROUP && !d->threadgroup_bytes[p->index])
            report_add("binding", NULL, "kernel %s: no length for threadgroup index %d", k->name,
                       p->index);
    }
    uint64_t threads = (uint64_t)d->threads[0] * d->threads[1] * d->threads[2];
    if (!threads || !d->grid[0] || !d->grid[1] || !d->grid[2])
        report_add("binding", NULL, "kernel %s: empty dispatch", k->name);
    if (threads > (uint64_t)k->threads_max)
        report_add("limit", NULL, "kernel %s: %lu threads a threadgroup, its limit is %d", k->name,
                   (unsigned long)threads, k->threads_max);
    memory_set_read_only(bindings, k);
    return report_count() == 0;
}

/* ---- running ------------------------------------------------------------------------------ */

static bool dispatch_run_threadgroup(const struct emu_dispatch *d, struct emu_thread *t)
{
    for (int i = 0; i < 3; i++) {
        uint32_t first = t->threadgroup_position[i] * d->threads[i];
        uint32_t left = t->threads_per_grid[i] - first;
        t->threadgroup_size[i] = left < d->threads[i] ? left : d->threads[i];
    }
    const unsigned *size = t->threadgroup_size;
    unsigned n = size[0] * size[1] * size[2];
    machine.fiber_count = n;
    t->simdgroups = (n + EMU_SIMD_WIDTH - 1) / EMU_SIMD_WIDTH;
    for (unsigned i = 0; i < n; i++) {
        unsigned at[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
        for (int k = 0; k < 3; k++) {
            t->position_in_threadgroup[k] = at[k];
            t->position_in_grid[k] = t->threadgroup_position[k] * d->threads[k] + at[k];
        }
        t->index_in_threadgroup = i;
        t->lane = i % EMU_SIMD_WIDTH;
        t->simdgroup = i / EMU_SIMD_WIDTH;
        fiber_prepare(i, t);
    }
    memory_begin_threadgroup();
    return fiber_run_threadgroup();
}

static void dispatch_run(const struct emu_dispatch *d)
{
    struct emu_thread t = {.bindings = &machine.bindings};
    uint64_t groups = 1;
    for (int i = 0; i < 3; i++) {
        t.dispatch_threadgroup_size[i] = d->threads[i];
        t.threadgroups_per_grid[i] =
            d->grid_in_threads ? (d->grid[i] + d->threads[i] - 1) / d->threads[i] : d->grid[i];
        t.threads_per_grid[i] = d->grid_in_threads ? d->grid[i] : d->grid[i] * d->threads[i];
        groups *= t.threadgroups_per_grid[i];
    }
    uint64_t start = d->order == EMU_RANDOM ? fiber_random() % groups : 0;
    for (uint64_t i = 0; i < groups; i++) {
        uint64_t g = d->order == EMU_REVERSE ? groups - 1 - i : (i + start) % groups;
        const unsigned *n = t.threadgroups_per_grid;
        t.threadgroup_position[0] = (unsigned)(g % n[0]);
        t.threadgroup_position[1] = (unsigned)(g / n[0] % n[1]);
        t.threadgroup_position[2] = (unsigned)(g / n[0] / n[1]);
        if (!dispatch_run_threadgroup(d, &t))
            return; /* stuck, and reported */
    }
}

int emu_dispatch(const struct emu_dispatch *d)
{
    if (!machine.fibers && !(machine.fibers = calloc(EMU_THREADS_MAX, sizeof *machine.fibers)))
        abort();
    machine.kernel = d->kernel;
    machine.order = d->order;
    machine.random_state = d->seed * 2654435761u | 1;
    machine.switches = 0;
    machine.accesses = 0;
    report_begin();
    memory_begin_dispatch();
    struct guard guard;
    dispatch_guard_begin(&guard, d);
    if (!sigsetjmp(machine.escape, 1) && dispatch_bind(d))
        dispatch_run(d);
    machine.current = NULL;
    machine.in_kernel = false;
    dispatch_guard_end(&guard);
    return report_count();
}

static bool broken_products;

void emu_break_products(bool broken)
{
    broken_products = broken;
}

int emu_products_are_broken(void)
{
    return broken_products;
}

uint64_t emu_switches(void)
{
    return machine.switches;
}

uint64_t emu_accesses(void)
{
    return machine.accesses;
}
