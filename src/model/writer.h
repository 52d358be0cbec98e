/* Writes a checkpoint: shards of bounded size and their index, tensors in any order and from any
 * thread.
 *
 * Invariant: until writer_finish succeeds, the folder holds only files named *.part, so what an
 * interrupted run leaves behind cannot be taken for a checkpoint. */
#ifndef MODEL_WRITER_H
#define MODEL_WRITER_H

#include "model/safetensors.h"

struct writer_tensor {
    char *name; /* the writer's after writer_open */
    enum safetensors_dtype dtype;
    uint32_t rank;
    uint64_t shape[SAFETENSORS_RANK_MAX];
    uint64_t bytes; /* filled in by writer_open, as what follows */
    uint32_t shard;
    uint64_t offset; /* in the shard's file */
};

struct writer_shard;

struct writer {
    char *folder;
    struct writer_tensor *tensors; /* [count], in the caller's order */
    uint32_t count;
    struct writer_shard *shards; /* [shard_count] */
    uint32_t shard_count;
    uint64_t total_bytes;
};

/* Makes the folder if need be and lays the tensors out in shards of at most shard_bytes (a larger
 * tensor has a shard of its own). Takes `tensors` (a malloc block) and the names over. Fails when
 * the folder already holds a checkpoint or the disk has not the room. */
bool writer_open(struct writer *writer, const char *folder, struct writer_tensor *tensors,
                 uint32_t count, uint64_t shard_bytes, struct err *err);

/* Writes bytes of tensor number `tensor`, from byte `at` of it. Thread-safe. */
bool writer_write(const struct writer *writer, uint32_t tensor, uint64_t at, const void *data,
                  uint64_t bytes, struct err *err);

/* Gives the shards their final names and writes the index. */
bool writer_finish(struct writer *writer, struct err *err);

/* Releases everything; removes the *.part files of a run that did not finish. */
void writer_close(struct writer *writer);

/* Writes a small file into folder. */
bool writer_put_file(const char *folder, const char *name, const char *text, size_t n,
                     struct err *err);

#endif
