#include "backend/cpu/fast_embed.h"
