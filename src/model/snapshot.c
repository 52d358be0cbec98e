/* Copies recurrent states and parts of pages between a device and the host.
 *
 * Invariant: saving and loading walk the same pieces in the same order (snapshot_walk), so the
 * layout is written down once. */
#include "model/snapshot.h"

#include <assert.h>

/* Called for each piece of device memory, in the order of the layout. */
typedef void snapshot_piece(struct device *device, struct span at, uint8_t *bytes, uint64_t n);

static uint64_t snapshot_delta_bytes(const struct config *c)
{
    return 4ull * c->value_heads * CONFIG_DELTA_DIM * CONFIG_DELTA_DIM;
}

static uint64_t snapshot_conv_bytes(const struct config *c)
{
    uint64_t channels = (2ull * c->key_heads + c->value_heads) * CONFIG_DELTA_DIM;
    return 4ull * (CONFIG_CONV_TAPS - 1) * channels;
}

/* Bytes of `rows` positions of one KV head. */
static uint64_t snapshot_row_bytes(enum kv_kind kind, uint32_t rows)
{
    return (kind == KV_BF16 ? 2ull : 4ull) * CONFIG_HEAD_DIM * rows;
}

static uint64_t snapshot_size(const struct config *c, enum kv_kind kind, uint32_t rows)
{
    return c->delta_layers * (snapshot_delta_bytes(c) + snapshot_conv_bytes(c)) +
           2ull * c->attention_layers * c->kv_heads * snapshot_row_bytes(kind, rows);
}

uint64_t snapshot_bytes(const struct state *state, uint32_t pos)
{
    return snapshot_size(&state->model->config, state->limits.kv_kind, pos % KV_PAGE);
}

uint64_t snapshot_most_bytes(const struct config *config, enum kv_kind kind)
{
    return snapshot_size(config, kind, KV_PAGE - 1);
}

/* The first `rows` positions of a page, all heads of K or of V. */
static uint8_t *snapshot_walk_page(const struct state *state, struct span pages, uint32_t page,
                                   uint32_t rows, uint8_t *bytes, snapshot_piece *piece)
{
    uint32_t kv_heads = state->model->config.kv_heads;
    uint64_t n = snapshot_row_bytes(state->limits.kv_kind, rows),
             whole = snapshot_row_bytes(state->limits.kv_kind, KV_PAGE);
    if (rows == KV_PAGE) {
        piece(state->model->device, span_at(pages, page * kv_heads * whole), bytes,
              kv_heads * whole);
        return bytes + kv_heads * whole;
    }
    for (uint32_t head = 0; head < kv_heads; head++, bytes += n)
        piece(state->model->device, span_at(pages, ((uint64_t)page * kv_heads + head) * whole),
              bytes, n);
    return bytes;
}

static void snapshot_walk(const struct state *state, uint32_t slot, uint32_t pos, uint8_t *bytes,
                          snapshot_piece *piece)
{
    const struct config *c = &state->model->config;
    struct device *device = state->model->device;
    uint64_t delta = snapshot_delta_bytes(c), conv = snapshot_conv_bytes(c);
    uint32_t rows = pos % KV_PAGE;
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        if (!c->full_attention[layer]) {
            piece(device, span_at(state_delta(state, layer), slot * delta), bytes, delta);
            piece(device, span_at(state_conv(state, layer), slot * conv), bytes + delta, conv);
            bytes += delta + conv;
        } else if (rows) {
            uint32_t page = state->host_table[(size_t)slot * state->pages_max + pos / KV_PAGE];
            bytes =
                snapshot_walk_page(state, state_k_pages(state, layer), page, rows, bytes, piece);
            bytes =
                snapshot_walk_page(state, state_v_pages(state, layer), page, rows, bytes, piece);
        }
    }
}

static void snapshot_read(struct device *device, struct span at, uint8_t *bytes, uint64_t n)
{
    device_calls(device)->read(device, bytes, at, n);
}

static void snapshot_write(struct device *device, struct span at, uint8_t *bytes, uint64_t n)
{
    device_calls(device)->write(device, at, bytes, n);
}

bool snapshot_save(const struct state *state, uint32_t slot, uint8_t *out, struct err *err)
{
    assert(state->slot_used[slot]);
    snapshot_walk(state, slot, state->slot_pos[slot], out, snapshot_read);
    return device_calls(state->model->device)->sync(state->model->device, err);
}

bool snapshot_load(struct state *state, uint32_t slot, uint32_t pos, const uint8_t *bytes,
                   struct err *err)
{
    assert(state->slot_used[slot] && state->slot_pages[slot] == pos / KV_PAGE);
    state->slot_pos[slot] = pos - pos % KV_PAGE;
    if (!state_reserve(state, slot, pos % KV_PAGE, err))
        return false;
    snapshot_walk(state, slot, pos, (uint8_t *)bytes, snapshot_write);
    state->slot_pos[slot] = pos;
    return device_calls(state->model->device)->sync(state->model->device, err);
}

static bool snapshot_walk_layers(const struct state *state, uint32_t page, uint8_t *bytes,
                                 snapshot_piece *piece, struct err *err)
{
    const struct config *c = &state->model->config;
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        if (!c->full_attention[layer])
            continue;
        bytes = snapshot_walk_page(state, state_k_pages(state, layer), page, KV_PAGE, bytes, piece);
        bytes = snapshot_walk_page(state, state_v_pages(state, layer), page, KV_PAGE, bytes, piece);
    }
    return device_calls(state->model->device)->sync(state->model->device, err);
}

bool snapshot_read_page(const struct state *state, uint32_t page, uint8_t *out, struct err *err)
{
    return snapshot_walk_layers(state, page, out, snapshot_read, err);
}

bool snapshot_write_page(struct state *state, uint32_t page, const uint8_t *bytes, struct err *err)
{
    return snapshot_walk_layers(state, page, (uint8_t *)bytes, snapshot_write, err);
}
