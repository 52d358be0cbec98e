/* The backends that this binary holds, and how to open one. */
#ifndef BACKEND_DEVICE_H
#define BACKEND_DEVICE_H

#include "backend/op.h"

struct device_options {
    const char
        *name;   /* "cpu", "cpu/ref", "cpu/avx2", "cuda", "metal", or null: the best one here */
    int threads; /* CPU: workers; 0 means one a core */
};

/* Opens a device; fails with the list of names when this binary or machine does not have it. */
bool device_open(const struct device_options *options, struct device **out, struct err *err);
void device_close(struct device *device);

/* Name of the i-th backend level that this machine can open, slowest first; null past the end. */
const char *device_name(int i);

#endif
