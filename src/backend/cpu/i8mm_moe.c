#include "backend/cpu/fast_moe.h"
