#include "base/err.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

bool err_set(struct err *err, enum err_kind kind, const char *fmt, ...)
{
    if (!err)
        return false;
    char text[sizeof err->text];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    err->kind = kind;
    memcpy(err->text, text, sizeof text);
    /* One line, whatever a file name or a tensor name held. */
    for (char *p = err->text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    return false;
}

bool err_set_errno(struct err *err, const char *fmt, ...)
{
    int code = errno;
    if (!err)
        return false;
    bool room = code == ENOSPC || code == EDQUOT || code == EFBIG || code == ENOMEM;
    char text[sizeof err->text / 2];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return err_set(err, room ? ERR_RESOURCE : ERR_INPUT, "%s: %s", text, strerror(code));
}

bool err_wrap(struct err *err, const char *fmt, ...)
{
    if (!err)
        return false;
    char context[sizeof err->text / 2];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(context, sizeof context, fmt, ap);
    va_end(ap);
    char old[sizeof err->text];
    memcpy(old, err->text, sizeof old);
    return err_set(err, err->kind, "%s: %s", context, old);
}

int err_exit_code(enum err_kind kind)
{
    switch (kind) {
    case ERR_NONE:
        return 0;
    case ERR_USAGE:
        return 2;
    case ERR_INPUT:
        return 3;
    case ERR_RESOURCE:
        return 4;
    case ERR_INTERNAL:
        return 5;
    }
    return 5;
}
