#include "backend/cpu/fast_attention.h"
