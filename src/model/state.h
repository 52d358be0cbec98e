/* What a sequence leaves behind: KV pages, GDN states, convolution rows; and the pools they come
 * from. All memory is taken when the pools open; a sequence only takes slots and pages.
 *
 * Invariant: a sequence's pages and its recurrent states always stand at the same position. */
#ifndef MODEL_STATE_H
#define MODEL_STATE_H

#include "model/model.h"

struct state_limits {
    uint32_t slots; /* sequences at a time */
    uint32_t ctx;   /* positions a sequence can have, at most */
    uint64_t pages; /* in the pool; 0: enough for every slot at full ctx */
    enum kv_kind kv_kind;
};

struct state {
    const struct model *model;
    struct state_limits limits;
    uint32_t pages_max;     /* columns of the page table */
    struct span kv;         /* [attention layer][k, v] of [pages, kv_heads, 256, 256] */
    struct span delta;      /* f32 [delta layer][slots, value_heads, 128, 128] */
    struct span conv;       /* f32 [delta layer][slots, 3, channels] */
    struct span page_table; /* u32 [slots, pages_max] on the device */
    uint32_t *host_table;   /* the same on the host */
    uint32_t *slot_pos;     /* [slots]: positions that the slot holds */
    uint32_t *slot_pages;   /* [slots]: pages that the slot holds */
    bool *slot_used;        /* [slots] */
    uint32_t *free_pages;   /* stack [pages] */
    uint64_t free_count;
    uint32_t *page_refs; /* [pages]: owners of a page (sequences, the prefix cache) */
    uint32_t *ordinal;   /* [layers]: how many layers of the same kind come before this one */
};

/* What the pools would take; UINT64_MAX where it passes 2^64. */
struct state_bytes {
    uint64_t kv, delta, conv, table, total;
};
struct state_bytes state_bytes(const struct config *config, const struct state_limits *limits);

bool state_open(const struct model *model, const struct state_limits *limits, struct state *state,
                struct err *err);
void state_close(struct state *state);

/* Takes an empty slot (position 0); fails when none is free. */
bool state_acquire(struct state *state, uint32_t *slot, struct err *err);
/* Gives the slot and its pages back. */
void state_release(struct state *state, uint32_t slot);
/* Makes the slot empty (position 0) and keeps it. */
void state_reset(struct state *state, uint32_t slot);
/* Takes the pages for `rows` more positions; fails, changing nothing, when the pool or ctx ends. */
bool state_reserve(struct state *state, uint32_t slot, uint32_t rows, struct err *err);
/* Gives back the pages beyond the slot's position: undoes a state_reserve that was not used. */
void state_trim(struct state *state, uint32_t slot);

/* Bytes of one page number: K and V of every attention layer. */
uint64_t state_page_bytes(const struct state *state);
/* The slot (empty) begins with `count` pages that others own too; it never writes to them. */
void state_attach_pages(struct state *state, uint32_t slot, const uint32_t *page, uint32_t count);
/* One more owner of a page; one fewer, and the page is free when none is left. */
void state_hold_page(struct state *state, uint32_t page);
void state_drop_page(struct state *state, uint32_t page);
/* Takes a free page for an owner that is not a slot; fails when the pool is empty. */
bool state_take_page(struct state *state, uint32_t *page);

/* Where a layer's memory lies; `layer` is the model's layer number. */
struct span state_k_pages(const struct state *state, uint32_t layer);
struct span state_v_pages(const struct state *state, uint32_t layer);
struct span state_delta(const struct state *state, uint32_t layer);
struct span state_conv(const struct state *state, uint32_t layer);

#endif
