/* Apple GPUs from Apple7 (M1) on, macOS 14 and newer. All that the rest of the program sees. */
#ifndef BACKEND_METAL_METAL_H
#define BACKEND_METAL_METAL_H

#include "backend/device.h"

/* "metal/simdgroup" for i = 0 where a GPU will do, "metal/tensor" for 1 where it has TensorOps too
 * (an M5 or newer, macOS 26.1); else null. */
const char *metal_level_name(int i);

bool metal_open(const char *level, const struct device_options *options, struct device **out,
                struct err *err);

#endif
