/* The emulator as a host sees it: load a kernel library, make buffers, dispatch, read findings.
 *
 * One process-wide machine, not thread-safe: one dispatch at a time. tests/metal/emulator.py and
 * the stub of the Metal framework are its two callers. */
#ifndef EMU_H
#define EMU_H

#include "emu_abi.h"

#include <stdbool.h>
#include <stdint.h>

struct emu_constant {
    int index;
    int bytes;
    unsigned char value[16];
};

enum emu_order { EMU_FORWARD, EMU_REVERSE, EMU_RANDOM };

struct emu_dispatch {
    void *kernel;
    void *buffer[EMU_BUFFERS_MAX]; /* addresses inside buffers of emu_buffer_new, or null */
    uint32_t threadgroup_bytes[EMU_BUFFERS_MAX];
    uint32_t grid[3]; /* in threads when grid_in_threads, else in threadgroups */
    uint32_t threads[3];
    int32_t grid_in_threads;
    int32_t order; /* enum emu_order: of threads and of threadgroups */
    uint32_t seed; /* of EMU_RANDOM */
    int32_t flush_to_zero;
    uint32_t timeout_ms; /* 0: none */
};

/* One thing that was wrong. `library` and `offset` give the place in the machine code. */
struct emu_finding {
    char kind[32];
    char message[256];
    const char *library; /* path, or null */
    uint64_t offset;
    uint32_t threadgroup[3];
    int32_t thread; /* -1: of no single thread */
};

/* Null with a message in emu_error(). The same file may be loaded again with other constants. */
void *emu_library_open(const char *path, const struct emu_constant *constants, int count);
void *emu_library_kernel(void *library, const char *name); /* null: there is none */
const char *emu_library_kernel_name(void *library, int i); /* null past the end */
int emu_kernel_threads_max(void *kernel);
const char *emu_error(void);

/* A buffer of exactly `bytes` bytes, filled with 0xCD, with unmapped pages on both sides. */
void *emu_buffer_new(uint64_t bytes, const char *name);
void emu_buffer_free(void *buffer);
/* Makes foreign memory known as a buffer. */
void emu_buffer_adopt(void *address, uint64_t bytes, const char *name);
/* Bytes left from `address` to the end of its buffer; 0 when it lies in none. */
uint64_t emu_buffer_left(const void *address);

/* Runs the dispatch and returns the number of findings, of which the first are kept. */
int emu_dispatch(const struct emu_dispatch *d);
const struct emu_finding *emu_finding(int i); /* null past the last kept */
/* A machine whose matmul2d leaves out the last step of K. */
void emu_break_products(bool broken);
uint64_t emu_switches(void);               /* of fibers, in the last dispatch */
uint64_t emu_accesses(void);               /* checked, in the last dispatch */
uint32_t emu_threadgroup_bytes_used(void); /* of the last dispatch's kernel */

#endif
