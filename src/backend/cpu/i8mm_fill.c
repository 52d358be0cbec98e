/* What cpu/i8mm does otherwise than cpu/neon: products with 4-bit weights. */
#include "backend/cpu/fast.h"

void i8mm_fill(struct ops *ops)
{
    ops->linear = i8mm_linear;
    ops->moe_route = i8mm_moe_route; /* comes with the experts' file */
    ops->moe_experts = i8mm_moe_experts;
}
