#include "backend/cpu/fast_linear.h"
