/* Works off an answer's mailbox on the connection's thread: tokens to text, thoughts and calls, and
 * these to server-sent events or to the whole reply. */
#ifndef SERVER_STREAM_H
#define SERVER_STREAM_H

#include "server/answer.h"

void stream_open_choice(struct choice *choice);

/* Waits until all choices have ended or one failed (answer->failed). False: the client has gone. */
bool stream_collect(struct answer *answer);

/* libmicrohttpd's content reader: user is a struct answer. */
ssize_t stream_read(void *user, uint64_t pos, char *out, size_t max);

#endif
