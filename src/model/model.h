/* A loaded checkpoint: the config and one struct weight a matrix, on a device.
 *
 * Weights stay in the mapped files where the device can use them there. Small vectors (norm gains,
 * convolution taps, A_log, dt_bias) are converted to f32 and copied. Norm gains are stored as the
 * factor itself: the loader adds the 1 for Hugging Face files. */
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H

#include "backend/op.h"
#include "model/config.h"

struct model_attention {
    struct weight q, k, v, o;   /* q: [heads * 512, hidden] with a gate beside each head */
    struct span q_norm, k_norm; /* f32 [256] */
};

struct model_delta {
    struct weight qkv, z, a, b, out;
    struct span conv;    /* f32 [channels, 4] */
    struct span a_log;   /* f32 [value_heads] */
    struct span dt_bias; /* f32 [value_heads] */
    struct span norm;    /* f32 [128] */
};

struct model_layer {
    bool full_attention;
    struct span input_norm, post_norm; /* f32 [hidden] */
    struct model_attention attention;  /* when full_attention */
    struct model_delta delta;          /* otherwise */
    struct weight router, shared_router;
    struct weight gate, up, down; /* [experts] */
    struct weight shared_gate_proj, shared_up, shared_down;
};

/* Bytes of the checkpoint by part, as `calla info` prints them. */
struct model_bytes {
    uint64_t embedding, head, attention, delta, experts, shared, router, norms, total;
    uint64_t per_token; /* read for one decoded token */
    uint64_t parameters, active_parameters;
};

struct model {
    struct config config;
    struct device *device;
    struct weight embed, head;
    struct span final_norm;     /* f32 [hidden] */
    struct model_layer *layers; /* [config.layers] */
    struct model_bytes bytes;
    struct model_files *files; /* the mapped shards; private to model/weights.h */
};

struct model_options {
    bool lock;       /* mlock the mapped weights (needs the limit for it) */
    bool huge_pages; /* copy the weights into huge pages instead of using the mapping */
    void (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes); /* or null */
    void *progress_user;
};

/* Checks the whole checkpoint (config, headers, names, shapes, dtypes, offsets) before anything
 * large is allocated, then makes every weight usable on the device. Every tensor of the files is
 * consumed or begins with a skipped prefix (vision_tower., model.visual., mtp.), else the load
 * fails and names it. `device` null: checks and sizes only (calla info). */
bool model_open(const char *folder, struct device *device, const struct model_options *options,
                struct model *model, struct err *err);
void model_close(struct model *model);

#endif
