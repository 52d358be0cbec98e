/* What a compiled kernel library and the emulator's runtime know of each other: how a kernel
 * registers itself, what a thread of it is told, and the calls by which it waits for others.
 *
 * Included by the runtime (C11) and by the prelude of every kernel (C++20, no libc headers). */
#ifndef EMU_ABI_H
#define EMU_ABI_H

typedef __SIZE_TYPE__ emu_size;

enum {
    EMU_SIMD_WIDTH = 32,
    EMU_THREADS_MAX = 1024,            /* a threadgroup */
    EMU_BUFFERS_MAX = 31,              /* argument-table entries of a compute function */
    EMU_THREADGROUP_BYTES_MAX = 32768, /* of every Apple GPU family */
};

/* Bits of metal::mem_flags. */
enum { EMU_MEM_DEVICE = 1, EMU_MEM_THREADGROUP = 2 };

/* What the attribute of a kernel argument asks for. */
enum emu_argument_kind {
    EMU_ARG_BUFFER,
    EMU_ARG_THREADGROUP,
    EMU_ARG_THREAD_POSITION_IN_GRID,
    EMU_ARG_THREADGROUP_POSITION_IN_GRID,
    EMU_ARG_THREAD_POSITION_IN_THREADGROUP,
    EMU_ARG_THREADS_PER_THREADGROUP,
    EMU_ARG_DISPATCH_THREADS_PER_THREADGROUP,
    EMU_ARG_THREADGROUPS_PER_GRID,
    EMU_ARG_THREADS_PER_GRID,
    EMU_ARG_THREAD_INDEX_IN_THREADGROUP,
    EMU_ARG_THREAD_INDEX_IN_SIMDGROUP,
    EMU_ARG_SIMDGROUP_INDEX_IN_THREADGROUP,
    EMU_ARG_SIMDGROUPS_PER_THREADGROUP,
    EMU_ARG_THREADS_PER_SIMDGROUP,
};

struct emu_parameter {
    int kind;           /* enum emu_argument_kind */
    int index;          /* of EMU_ARG_BUFFER and EMU_ARG_THREADGROUP */
    int optional;       /* depends on a function constant: may stay unbound */
    int is_reference;   /* then `bytes` must be bound at the least */
    int is_const;       /* the kernel promises not to write through it */
    emu_size bytes;     /* of one element */
    emu_size alignment; /* of one element */
};

/* The arguments of one dispatch, the same for every thread. */
struct emu_bindings {
    void *buffer[EMU_BUFFERS_MAX];
    void *threadgroup[EMU_BUFFERS_MAX];
};

/* What one thread is. */
struct emu_thread {
    const struct emu_bindings *bindings;
    unsigned position_in_grid[3];
    unsigned threadgroup_position[3];
    unsigned position_in_threadgroup[3];
    unsigned threadgroup_size[3];          /* of this threadgroup: smaller at a ragged edge */
    unsigned dispatch_threadgroup_size[3]; /* as dispatched */
    unsigned threadgroups_per_grid[3];
    unsigned threads_per_grid[3];
    unsigned index_in_threadgroup;
    unsigned lane; /* index in the simdgroup */
    unsigned simdgroup;
    unsigned simdgroups;
};

typedef void (*emu_entry)(const struct emu_thread *);

/* The body of an operation that several threads do together. It runs once, when the last of them
 * has arrived; in[i] and out[i] belong to the i-th of them, in[i] is null where one is absent. */
typedef void (*emu_collective)(void *const *in, void *const *out, unsigned count);

/* The compiler must neither fold two calls into one nor copy one into two (it does copy a barrier
 * that stands between two tests of one condition). */
#ifdef __clang__
#define EMU_ONE_CALL __attribute__((noduplicate, nomerge, convergent))
#else
#define EMU_ONE_CALL
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Called by the constructors of a library while it is loaded. */
void emu_register_kernel(const char *name, emu_entry entry, const struct emu_parameter *parameters,
                         int count, int threads_max);

/* Copies the value of a function constant; returns 0 and copies nothing when it has none. */
int emu_function_constant(int index, void *out, emu_size bytes);

/* The place of a threadgroup variable. `slot` is a static of the variable, -1 until placed. */
void *emu_threadgroup_variable(int *slot, emu_size bytes, emu_size alignment, const char *name);

/* The machine address of the call, which names the source call. */
EMU_ONE_CALL const void *emu_site(void);

EMU_ONE_CALL void emu_threadgroup_barrier(int flags, const void *site);
EMU_ONE_CALL void emu_simdgroup_barrier(int flags, const void *site);

/* Orders what the threadgroup did to device memory before with what it does after, for all
 * threadgroups. */
void emu_device_fence(void);

/* Waits for the other lanes of the simdgroup at the same site, then `body` runs for all. */
void emu_simd_collective(const void *site, void *in, void *out, emu_collective body);

/* The same for the whole threadgroup, which must have `threads` threads. */
void emu_group_collective(const void *site, void *in, void *out, emu_collective body,
                          unsigned threads);

unsigned emu_lane(void);
unsigned emu_index_in_threadgroup(void);

/* 0..31: the lane with which a reduction begins; it varies with the order of the run, because
 * the hardware's order of summation is not specified. */
unsigned emu_first_lane(void);

/* A checked access on behalf of a collective body, which is not itself checked. */
void emu_touch(const void *address, emu_size bytes, int is_write);

/* An index of a vector or metal::array is out of range. */
void emu_index_outside(void);

/* Whether this machine's TensorOps are to be wrong; see emu_break_products. */
int emu_products_are_broken(void);

/* A rule of the language was broken by the operation in which the thread waits. */
void emu_violation(const char *message);

#ifdef __cplusplus
}
#endif
#endif
