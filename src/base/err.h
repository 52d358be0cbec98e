/* The error that a fallible call hands back.
 *
 * Whatever can fail because of the world (a file, a request, memory of a size that input chose)
 * returns bool and takes a `struct err *` last. The text says what was wrong, where, and what to
 * do, in one line without a final newline. Bugs are asserts, never errors. */
#ifndef BASE_ERR_H
#define BASE_ERR_H

#include <stdarg.h>
#include <stdbool.h>

enum err_kind {
    ERR_NONE = 0,
    ERR_USAGE, /* the command line or a request asks for something that does not exist */
    ERR_INPUT, /* a file, a model or a request body is damaged, does not fit, or cannot be read or
                   * written */
    ERR_RESOURCE, /* memory, context, disk or a device is too small */
    ERR_INTERNAL, /* a numerical fault or a device error: ours to mend */
};

struct err {
    enum err_kind kind;
    char text[1024];
};

/* Stores kind and text, and returns false, so that callers can `return err_set(...)`. A null err
 * is allowed. */
bool err_set(struct err *err, enum err_kind kind, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* For what the system refused: the text, then ": " and what errno says. The kind is ERR_RESOURCE
 * for want of room (a full disk, a quota, memory), else ERR_INPUT. */
bool err_set_errno(struct err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Puts "context: " before the text that err holds already; returns false. */
bool err_wrap(struct err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The process exit code for an error of this kind: usage 2, input 3, resource 4, internal 5. */
int err_exit_code(enum err_kind kind);

#endif
