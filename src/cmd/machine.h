/* What a measurement was made on: facts about this machine, and how fast its memory is. */
#ifndef CMD_MACHINE_H
#define CMD_MACHINE_H

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

struct machine {
    char chip[128];   /* the processor's name */
    int processors;   /* that this process may use */
    uint64_t memory;  /* bytes */
    char system[192]; /* operating system and kernel */
    char power[16];   /* "mains", "battery" or "unknown" */
};

void machine_read(struct machine *out);

/* What built this program: version, compiler, architecture. */
const char *machine_build(void);

/* Bytes a second that `threads` threads (0: one a processor) read from memory, the best of some
 * passes over a gigabyte, in small pages or in huge ones where the system gives them. */
bool machine_measure_memory(int threads, bool huge_pages, double *out, struct err *err);

#endif
