/* Reference: projections, with the norm before them and the residual after them. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_weight.h"
#include "backend/cpu/ref_math.h"

#include <string.h>

/* h f32 [rows, cols]: the selected rows of x, normalised when there is a gain. */
static void ref_linear_input(const struct linear_args *args, uint32_t cols, float *h)
{
    const float *x = cpu_at(args->x);
    const uint32_t *select = args->select.base ? cpu_at(args->select) : NULL;
    for (uint32_t r = 0; r < args->rows; r++) {
        const float *from = x + (size_t)(select ? select[r] : r) * cols;
        float *to = h + (size_t)r * cols;
        if (args->gain.base)
            ref_rms_norm(from, cpu_at(args->gain), cols, args->eps, to);
        else
            memcpy(to, from, (size_t)cols * sizeof *to);
    }
}

void ref_linear(struct device *device, const struct linear_args *args)
{
    uint32_t cols = args->weight[0]->cols;
    float *h = cpu_scratch(device, 0, (size_t)args->rows * cols, sizeof *h);
    float *row = cpu_scratch(device, 1, cols, sizeof *row);
    if (!h || !row)
        return;
    ref_linear_input(args, cols, h);
    for (uint32_t i = 0; i < args->n; i++) {
        const struct weight *w = args->weight[i];
        float *out = cpu_at(args->out[i]); /* [rows, w->rows] */
        for (uint32_t o = 0; o < w->rows; o++) {
            cpu_weight_read_row(w, 0, o, row);
            for (uint32_t r = 0; r < args->rows; r++) {
                float *to = out + (size_t)r * w->rows + o;
                double sum = ref_dot(row, h + (size_t)r * cols, cols);
                *to = (float)(args->add ? *to + sum : sum);
            }
        }
    }
}
