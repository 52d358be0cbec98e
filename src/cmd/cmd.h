/* The subcommands of the one binary. A command gets its own arguments (argv[0] is its name), prints
 * for the user, and returns the process's exit code: 0, or what err_exit_code gives. */
#ifndef CMD_CMD_H
#define CMD_CMD_H

#include "base/buf.h"
#include "base/err.h"
#include "text/tokenizer.h"

#include <getopt.h>
#include <stdbool.h>
#include <stdint.h>

#define CALLA_VERSION "0.1.0"

struct cmd {
    const char *name;
    const char *summary; /* one line for `calla --help` */
    int (*run)(int argc, char **argv);
};

int cmd_bench(int argc, char **argv);
int cmd_chat(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_pull(int argc, char **argv);
int cmd_quantize(int argc, char **argv);
int cmd_render(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_synth(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);

/* Prints "calla NAME: error text" to stderr and returns the exit code for it. */
int cmd_fail(const char *name, const struct err *err);

/* Prints "calla NAME: text" and a hint at --help to stderr; returns the usage exit code. */
int cmd_usage(const char *name, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The next option of a command, as getopt_long gives it, or -1. '?' when it does not exist or lacks
 * its value: then the user knows (cmd_usage), and the command ends with ERR_USAGE's code. The short
 * options begin with ':'. */
int cmd_next_option(int argc, char **argv, const char *shorts, const struct option *longs);

/* An option's text as a value within bounds, or a message that names the option. */
bool cmd_parse_uint(const char *option, const char *text, uint64_t lo, uint64_t hi, uint64_t *out,
                    struct err *err);
bool cmd_parse_u32(const char *option, const char *text, uint32_t lo, uint32_t hi, uint32_t *out,
                   struct err *err);
bool cmd_parse_float(const char *option, const char *text, double lo, double hi, double *out,
                     struct err *err);
/* A number of bytes, also with K, M or G. */
bool cmd_parse_bytes(const char *option, const char *text, uint64_t lo, uint64_t *out,
                     struct err *err);
/* Of struct weight: bits of a code, and weights that share a scale. */
bool cmd_parse_bits(const char *option, const char *text, uint32_t *out, struct err *err);
bool cmd_parse_group(const char *option, const char *text, uint32_t *out, struct err *err);

/* Token ids separated by anything that separates them in print: spaces, commas, brackets. */
bool cmd_parse_ids(const char *text, struct token_list *ids, struct err *err);

/* Appends standard input to its end. */
bool cmd_read_stdin(struct buf *out, struct err *err);

/* Shows "12.3 %" on stderr, a few times a second; user is a uint64_t of the caller's, at first
 * 0. */
void cmd_show_progress(void *user, uint64_t done, uint64_t total);

/* Path of the running binary, without links; false when the system does not tell. */
bool cmd_binary_path(char *out, size_t size);

/* The model folder to use when none is named: models/demo beside the binary's tree, or
 * ../share/calla/models/demo. Null when there is none. The caller frees it. */
char *cmd_default_model(void);

#endif
