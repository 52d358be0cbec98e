/* A conversation with the model: its messages, and answering the next one. */
#ifndef CMD_TALK_H
#define CMD_TALK_H

#include "engine/engine.h"

#include <jansson.h>

struct talk {
    struct engine *engine; /* borrowed */
    struct sampler_options sampling;
    uint32_t max_tokens; /* an answer; 0: until the context ends */
    bool think;
    bool keep_thoughts;    /* earlier thoughts stay in the prompt */
    bool colours;          /* stdout is a terminal: thoughts are shown, dimmed */
    bool (*stopped)(void); /* asks whether the answer is to end now; or null */

    json_t *messages; /* OpenAI chat messages; owned */

    uint64_t answers, tokens; /* given so far */
    double seconds;           /* spent on them after the first token */
    uint32_t context;         /* positions that the last request used */
};

void talk_open(struct talk *talk, struct engine *engine);
void talk_close(struct talk *talk);

/* Forgets all messages but the system message. */
void talk_reset(struct talk *talk);

/* Sets the system message; empty text removes it. Fails for text that is not UTF-8. */
bool talk_set_system(struct talk *talk, const char *text, size_t n, struct err *err);

/* Adds a user message and streams the answer to stdout and a line of statistics to stderr. An
 * answer that was stopped keeps what there is of it. On failure the message is taken back. */
bool talk_answer(struct talk *talk, const char *text, size_t n, struct err *err);

#endif
