/* Reading messages from a terminal: editing, history, pasted blocks, interrupts. */
#ifndef CMD_LINE_H
#define CMD_LINE_H

#include "base/buf.h"
#include "base/err.h"

struct line;

enum line_result {
    LINE_TEXT,      /* a message, perhaps of several lines, perhaps empty */
    LINE_INTERRUPT, /* Ctrl-C on an empty line */
    LINE_DROPPED,   /* Ctrl-C on a line with text, which is thrown away */
    LINE_END,       /* Ctrl-D on an empty line, a closed terminal, or a request to terminate */
};

/* Takes over the terminal on standard input, and SIGINT, SIGTERM, SIGHUP and SIGWINCH.
 * `history_path`: a file that is read now and written by line_close; null for none. One at a
 * time. */
bool line_open(const char *history_path, struct line **out, struct err *err);

/* Restores the signals; the terminal is as it was whenever no line is being read. */
void line_close(struct line *line);

/* Reads a message into out (cleared first). A pasted block is part of the message whatever it
 * holds; Alt-Enter, or a backslash at the end of a line, puts a newline into it. */
enum line_result line_read(struct line *line, const char *prompt, struct buf *out);

/* How often Ctrl-C was pressed since the last call; a request to terminate counts many times. */
int line_take_interrupts(void);

/* The same without forgetting them. */
int line_interrupts(void);

#endif
