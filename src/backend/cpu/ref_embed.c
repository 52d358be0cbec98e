/* Reference: the embedding lookup, and the plain copy that snapshots need. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_weight.h"

#include <assert.h>
#include <string.h>

void ref_embed(struct device *device, const struct embed_args *args)
{
    (void)device;
    const int32_t *tokens = cpu_at(args->batch->tokens);
    float *x = cpu_at(args->x);
    for (uint32_t r = 0; r < args->batch->rows; r++) {
        uint32_t token = tokens[r] < 0 ? 0 : (uint32_t)tokens[r];
        assert(token < args->table->rows);
        cpu_weight_read_row(args->table, 0, token, x + (size_t)r * args->table->cols);
    }
}

void ref_copy(struct device *device, struct span to, struct span from, uint64_t bytes)
{
    (void)device;
    if (bytes)
        memcpy(cpu_at(to), cpu_at(from), bytes);
}
