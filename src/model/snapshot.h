/* What a sequence's state is at one position, as bytes on the host: enough, together with the whole
 * KV pages before that position, to go on from there in any slot.
 *
 * Layout, layers in the model's order:
 *   of each Gated DeltaNet layer   f32 [value_heads, 128, 128], f32 [3, channels]
 *   of each attention layer        K, then V: kv_kind [kv_heads, pos % 256, 256], the page that
 *                                  is begun: copied, so that only whole pages are shared */
#ifndef MODEL_SNAPSHOT_H
#define MODEL_SNAPSHOT_H

#include "model/state.h"

/* Bytes of a snapshot at `pos`, and the most that one of any position has. */
uint64_t snapshot_bytes(const struct state *state, uint32_t pos);
uint64_t snapshot_most_bytes(const struct config *config, enum kv_kind kind);

/* Copies what the slot holds now to `out`, snapshot_bytes of slot_pos; false: a device error. */
bool snapshot_save(const struct state *state, uint32_t slot, uint8_t *out, struct err *err);

/* Puts a snapshot of `pos` into the slot, which holds exactly the pos / 256 whole pages before it;
 * the slot then stands at pos. Fails when a page for the rest is missing or the device fails; the
 * slot must be reset then. */
bool snapshot_load(struct state *state, uint32_t slot, uint32_t pos, const uint8_t *bytes,
                   struct err *err);

/* A whole page of every attention layer, state_page_bytes: K then V of each. */
bool snapshot_read_page(const struct state *state, uint32_t page, uint8_t *out, struct err *err);
bool snapshot_write_page(struct state *state, uint32_t page, const uint8_t *bytes, struct err *err);

#endif
