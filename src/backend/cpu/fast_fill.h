/* What a fast level puts into the op table. */
#include "backend/cpu/fast.h"

void LEVEL(fill)(struct ops *ops)
{
    ops->embed = LEVEL(embed);
    ops->linear = LEVEL(linear);
    ops->delta = LEVEL(delta);
    ops->kv_append = LEVEL(kv_append);
    ops->attention = LEVEL(attention);
    ops->attention_scratch = LEVEL(attention_scratch);
    ops->moe_route = LEVEL(moe_route);
    ops->moe_experts = LEVEL(moe_experts);
    ops->argmax = LEVEL(argmax);
    ops->top = LEVEL(top);
}
