/* One measurement of `calla bench`: a prompt is read and tokens are generated from it, in a process
 * that does nothing else. */
#ifndef CMD_MEASURE_H
#define CMD_MEASURE_H

#include "engine/engine.h"

struct measure_options {
    struct engine_options engine; /* ctx 0: as much as the measurement needs */
    uint32_t context;             /* tokens of the prompt */
    uint32_t decode;              /* tokens generated after the first, 0: none */
    uint32_t batch;               /* sequences at a time */
};

struct measure {
    char backend[32];
    double load_s;
    double prefill_s;      /* from the start until the first token (of all sequences) is out */
    double decode_s;       /* from there until the last token is out */
    double *step_s;        /* [decode] */
    int32_t first_id;      /* of the first sequence */
    struct token_list ids; /* after the first tokens: step by step, in a step by sequence */
    uint64_t digest;       /* FNV-1a over ids, a whole id a step */
    uint64_t token_bytes;  /* of weights, read for one token of one sequence */
    uint64_t resident;     /* bytes of the process in memory at the end */
};

/* Token i of the prompt that every engine is measured with: i * 2654435761 mod 2^32 mod vocab. */
int32_t measure_prompt_id(uint32_t i, uint32_t vocab);

/* Whether the measurement can be made here, as far as that shows without loading the weights. */
bool measure_check(const struct measure_options *options, struct err *err);

/* Warms up with the same shape (the whole prompt, two steps), then measures from a fresh state. */
bool measure_run(const struct measure_options *options, struct measure *out, struct err *err);
void measure_free(struct measure *m);

/* Bytes a second that the device's memory gives: read by all threads of a CPU in the best of
 * several ways, read and written by the copy of another device. */
bool measure_peak(const struct engine_options *options, double *out, struct err *err);

#endif
