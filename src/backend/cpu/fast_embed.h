/* The token table for the fast levels: one row of it a row of the batch. */
#include "backend/cpu/fast_rows.h"

static void embed_row(void *arg, uint32_t r, int worker)
{
    (void)worker;
    const struct embed_args *args = arg;
    int32_t given = ((const int32_t *)cpu_at(args->batch->tokens))[r];
    uint32_t token = given < 0 ? 0 : (uint32_t)given;
    assert(token < args->table->rows);
    fast_rows_decode(args->table, 0, token,
                     (float *)cpu_at(args->x) + (size_t)r * args->table->cols);
}

void LEVEL(embed)(struct device *device, const struct embed_args *args)
{
    struct embed_args copy = *args;
    pool_run(device->pool, embed_row, &copy, args->batch->rows);
}
