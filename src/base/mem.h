/* Host memory.
 *
 * Two kinds of allocation. Sizes that a program part fixes (a struct, a table of layers) cannot
 * reasonably fail: mem_new and mem_grow end the process with a message when they do. Sizes that
 * input chooses (a context, a prompt, a file) go through mem_try, whose failure is an error. */
#ifndef BASE_MEM_H
#define BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

/* count * size zeroed bytes, never null; free() releases them. */
void *mem_new(size_t count, size_t size);

/* realloc of an array to count * size bytes, never null; new bytes are not cleared. */
void *mem_grow(void *old, size_t count, size_t size);

/* count * size zeroed bytes, aligned to 64; null when there is not so much or the product
 * overflows. free() releases them. */
void *mem_try(size_t count, size_t size);

/* A zero-terminated copy of n bytes, never null. */
char *mem_copy_text(const char *text, size_t n);

/* Bytes of physical memory in this machine; 0 when unknown. */
uint64_t mem_machine_bytes(void);

/* Bytes that can be had now without swapping (MemAvailable and the like); 0 when unknown. */
uint64_t mem_available_bytes(void);

/* Bytes of this process now in RAM; 0 when unknown. */
uint64_t mem_resident_bytes(void);

#endif
