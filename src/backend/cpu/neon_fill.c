#include "backend/cpu/fast_fill.h"
