/* What a measurement was made on: facts about this machine, and how fast its memory is. */
#ifndef CMD_MACHINE_H
#define CMD_MACHINE_H

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

/* Bytes a second that `threads` threads (0: one a processor) read from memory: the best of several
 * passes over a gigabyte, with and without reading ahead, in small pages and in huge ones. */
bool machine_measure_memory(int threads, double *out, struct err *err);

#endif
