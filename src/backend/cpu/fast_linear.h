/* Projections for the fast levels: the norm, then every matrix over tiles of rows.
 *
 * Work split: a task is FAST_CHUNK outputs of one matrix for one tile of rows, so that a decode
 * step streams the weights once and in order, and a prompt decodes them once a tile. */
#include "backend/cpu/fast_rows.h"

struct linear_work {
    const struct linear_args *args;
    uint32_t tiles;
    struct fast_tile *tile; /* [tiles] */
    float *h;               /* f32 [rows, cols]: normalised rows, when there is a gain */
    uint32_t first_chunk[LINEAR_MAX + 1]; /* of each matrix, in one numbering */
    char *scratch;                        /* fast_rows_bytes a worker */
    size_t scratch_bytes;
    bool quantise;
};

/* Normalises one row and puts it into its tile. */
static void linear_prepare(void *arg, uint32_t r, int worker)
{
    (void)worker;
    struct linear_work *work = arg;
    const struct linear_args *args = work->args;
    const uint32_t *select = args->select.base ? cpu_at(args->select) : NULL;
    uint32_t cols = args->weight[0]->cols;
    const float *x = (const float *)cpu_at(args->x) + (size_t)(select ? select[r] : r) * cols;
    if (args->gain.base) {
        float *h = work->h + (size_t)r * cols;
        simd_rms_norm(x, cpu_at(args->gain), cols, args->eps, h);
        x = h;
    }
    fast_tile_set_row(&work->tile[r / FAST_TILE_ROWS], r % FAST_TILE_ROWS, x, work->quantise);
}

static void linear_multiply(void *arg, uint32_t task, int worker)
{
    struct linear_work *work = arg;
    const struct linear_args *args = work->args;
    uint32_t chunk = task / work->tiles, tile = task % work->tiles, i = 0;
    while (chunk >= work->first_chunk[i + 1])
        i++;
    const struct weight *w = args->weight[i];
    uint32_t o = (chunk - work->first_chunk[i]) * FAST_CHUNK;
    uint32_t count = w->rows - o < FAST_CHUNK ? w->rows - o : FAST_CHUNK;
    float *out = (float *)cpu_at(args->out[i]) + (size_t)tile * FAST_TILE_ROWS * w->rows + o;
    fast_rows_multiply(w, 0, o, count, &work->tile[tile], args->add, out, w->rows,
                       work->scratch + (size_t)worker * work->scratch_bytes);
}

void LEVEL(linear)(struct device *device, const struct linear_args *args)
{
    uint32_t cols = args->weight[0]->cols, rows = args->rows;
    struct linear_work work = {.args = args,
                               .tiles = (rows + FAST_TILE_ROWS - 1) / FAST_TILE_ROWS,
                               .scratch_bytes = fast_rows_bytes(cols)};
    for (uint32_t i = 0; i < args->n; i++) {
        uint32_t chunks = (args->weight[i]->rows + FAST_CHUNK - 1) / FAST_CHUNK;
        work.first_chunk[i + 1] = work.first_chunk[i] + chunks;
        work.quantise |= fast_is_dot4(args->weight[i]);
    }
    size_t tile_bytes = fast_tile_bytes(FAST_TILE_ROWS < rows ? FAST_TILE_ROWS : rows, cols);
    char *memory = cpu_scratch(device, 0, work.tiles, tile_bytes);
    work.tile = cpu_scratch(device, 1, work.tiles, sizeof *work.tile);
    work.scratch = cpu_scratch(device, 2, (size_t)device->threads, work.scratch_bytes);
    work.h = args->gain.base ? cpu_scratch(device, 3, (size_t)rows * cols, sizeof *work.h) : NULL;
    if (!memory || !work.tile || !work.scratch || (args->gain.base && !work.h))
        return;
    for (uint32_t i = 0; i < work.tiles; i++) {
        uint32_t left = rows - i * FAST_TILE_ROWS;
        work.tile[i] = fast_tile_place(memory + i * tile_bytes,
                                       left < FAST_TILE_ROWS ? left : FAST_TILE_ROWS, cols);
        work.tile[i].one_method = device->deterministic;
    }
    pool_run(device->pool, linear_prepare, &work, rows);
    pool_run(device->pool, linear_multiply, &work, work.first_chunk[args->n] * work.tiles);
}
