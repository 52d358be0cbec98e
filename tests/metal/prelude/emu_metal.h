// The declarations a Metal kernel sees, as ordinary C++ for clang. Precompiled once a build mode;
// written from the Metal Shading Language specification's function tables, no libc and no libc++.
// Where Metal's rule is not known the stricter reading is taken.
#pragma once
#pragma clang system_header
#include "../runtime/emu_abi.h"

#include "emu_types.h"

#include "emu_vec.h"

#include "emu_math.h"

#include "emu_simd.h"

#include "emu_matrix.h"

#include "emu_atomic.h"

#include "emu_tensor.h"

#include "emu_entry.h"
