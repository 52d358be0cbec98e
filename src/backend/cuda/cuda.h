/* NVIDIA GPUs from compute capability 8.0 on. All that the rest of the program sees of CUDA. */
#ifndef BACKEND_CUDA_CUDA_H
#define BACKEND_CUDA_CUDA_H

#include "backend/device.h"

/* "cuda" for i = 0 when this machine has a usable GPU, else null. Quick, and never fails: without
 * a driver the backend is just not there. */
const char *cuda_level_name(int i);

/* Why cuda_level_name has none. */
const char *cuda_absence(void);

/* options->without: a name of cuda_techniques (internal.cuh); an error lists them. */
bool cuda_open(const char *level, const struct device_options *options, struct device **out,
               struct err *err);

#endif
