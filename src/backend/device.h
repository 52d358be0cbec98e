/* The backends that this binary holds, and how to open one. */
#ifndef BACKEND_DEVICE_H
#define BACKEND_DEVICE_H

#include "backend/op.h"

struct device_options {
    const char *name; /* a level or a backend ("cpu/avx2", "cuda"); null: the best one here */
    int threads;      /* CPU: workers; 0 means one a core */
    /* What an op gives for a row then depends, to the bit, neither on the rows beside it nor on how
     * a sequence is cut into batches. Slower for long batches; CPU only. */
    bool deterministic;
    /* A technique that the kernels do without, so that its effect can be measured, or null. CUDA
     * only; the names are in cuda.h. */
    const char *without;
};

/* Opens a device; fails with the list of names when this binary or machine does not have it, and
 * with the reason where that is known. */
bool device_open(const struct device_options *options, struct device **out, struct err *err);
void device_close(struct device *device);

/* Name of the i-th backend level that this machine can open, slowest first; null past the end. */
const char *device_name(int i);

#endif
