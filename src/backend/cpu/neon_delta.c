#include "backend/cpu/fast_delta.h"
