/* The inside of struct disk, for the files disk*.c only. */
#ifndef ENGINE_DISK_CORE_H
#define ENGINE_DISK_CORE_H

#include "engine/disk.h"

#include <pthread.h>

enum { DISK_VERSION = 1, DISK_NAME = 64 };

struct disk_header {
    char magic[8];
    uint32_t version, kind;
    uint64_t model;
    struct disk_key key;
    uint32_t count, pos; /* tokens that follow; tokens before the entry's end */
    uint64_t bytes;      /* that follow them */
    uint64_t checksum;   /* of tokens and bytes */
    uint64_t header;     /* checksum of all the above */
};

_Static_assert(sizeof(struct disk_header) == 72, "no padding in files");

struct disk_entry {
    enum disk_kind kind;
    uint64_t model;
    struct disk_key key;
    uint32_t pos;
    uint64_t bytes; /* of the file */
    uint64_t used;  /* higher: later */
};

/* For the writer: a file to write, or one to remove. */
struct disk_job {
    char *unlink; /* its path, or null: write */
    struct disk_header header;
    int32_t *tokens;
    uint8_t *bytes;
    struct disk_job *next;
};

struct disk {
    char *folder;
    uint64_t limit, model, clock;
    pthread_mutex_t lock;
    pthread_cond_t wake, room; /* a job or closing; a job was done */
    pthread_cond_t read_wake;  /* a load to go on with, or closing */
    pthread_t writer, reader;
    bool has_writer, has_reader, closing, warned;
    struct disk_entry *entries; /* [count] */
    size_t count, cap;
    struct disk_job *jobs, **jobs_end;
    uint64_t waiting;        /* bytes in jobs, also of the one being written */
    struct disk_load *loads; /* a list, oldest first */
    void (*news)(void *user);
    void *news_user;
    struct disk_stats stats;
};

/* All with the lock held. */
struct disk_entry *disk_entry(struct disk *disk, enum disk_kind kind, struct disk_key key);
void disk_list(struct disk *disk, struct disk_entry entry);
/* Takes the entry off the list; the file is the writer's to remove, in turn. */
void disk_unlist(struct disk *disk, struct disk_entry *entry);
/* Unlists the least recently used until the rest fits. */
void disk_shrink(struct disk *disk);

void disk_file_name(char *out, enum disk_kind kind, uint64_t model, struct disk_key key,
                    uint32_t pos);

/* The path of an entry of this model; free() releases it. */
char *disk_path(const struct disk *disk, enum disk_kind kind, struct disk_key key, uint32_t pos);

/* The threads' functions: arg is the disk. They end once it closes and their work is done. */
void *disk_writer_main(void *arg);
void *disk_reader_main(void *arg);

#endif
