/* Options that every command with an engine has, and opening the engine with them. */
#ifndef CMD_LOAD_H
#define CMD_LOAD_H

#include "engine/engine.h"

enum {
    LOAD_BACKEND = 1000,
    LOAD_THREADS,
    LOAD_CTX,
    LOAD_CHUNK,
    LOAD_KV,
    LOAD_LOCK,
    LOAD_HUGE_PAGES,
    LOAD_DETERMINISTIC,
    LOAD_MEMORY,
};

/* For the array of long options; the short option is 'm'. */
#define LOAD_OPTIONS                                                                               \
    {"model", required_argument, NULL, 'm'}, {"backend", required_argument, NULL, LOAD_BACKEND},   \
        {"threads", required_argument, NULL, LOAD_THREADS},                                        \
        {"ctx", required_argument, NULL, LOAD_CTX},                                                \
        {"chunk", required_argument, NULL, LOAD_CHUNK}, {"kv", required_argument, NULL, LOAD_KV},  \
        {"lock", no_argument, NULL, LOAD_LOCK},                                                    \
        {"deterministic", no_argument, NULL, LOAD_DETERMINISTIC},                                  \
        {"memory", required_argument, NULL, LOAD_MEMORY},                                          \
    {                                                                                              \
        "huge-pages", no_argument, NULL, LOAD_HUGE_PAGES                                           \
    }

/* Their lines for --help. */
#define LOAD_HELP                                                                                  \
    "  -m, --model MODEL  folder, or name of a pulled model (default: the demo model)\n"           \
    "      --backend NAME cpu, cpu/ref, ... (default: the best one here)\n"                        \
    "      --threads N    CPU workers (default: one a core)\n"                                     \
    "      --ctx N        positions of context (default: the model's own, as far as it fits)\n"    \
    "      --chunk N      rows of the prompt a step (default: the device's)\n"                     \
    "      --kv TYPE      f32 or bf16 keys and values (default: the backend's)\n"                  \
    "      --memory N     use at most N MiB (default: what is free)\n"                             \
    "      --lock         keep the weights in memory (mlock)\n"                                    \
    "      --huge-pages   copy the weights into huge pages\n"                                      \
    "      --deterministic  the same bits however requests are batched, cut or cached (CPU "       \
    "only;\n"                                                                                      \
    "                     prompts are read more slowly)\n"

/* Takes the option c of getopt_long when it is one of LOAD_OPTIONS; else *taken is false. */
bool load_option(int c, const char *text, struct engine_options *options, bool *taken,
                 struct err *err);

/* The folder of the model that -m names (see store_find), or of the demo model when named is null.
 * The caller frees *out. */
bool load_find(const char *named, char **out, struct err *err);

/* Opens the engine, with progress on a terminal; without a model the demo model. */
bool load_engine(const struct engine_options *options, struct engine **out, struct err *err);

#endif
