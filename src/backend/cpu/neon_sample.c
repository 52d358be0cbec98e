#include "backend/cpu/fast_sample.h"
