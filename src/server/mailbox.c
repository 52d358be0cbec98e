/* Owns the queued mail and the pipe that wakes the reader.
 *
 * Invariant: under the lock, the pipe holds one byte exactly when `signalled`; it is signalled
 * whenever there is mail or the box is closed. */
#include "server/mailbox.h"

#include "base/clock.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* An answer that fills the context stays far below; a client that reads nothing of it is cut. */
enum { MAILBOX_MAX_BYTES = 16 << 20 };

#ifndef POLLRDHUP
#define POLLRDHUP 0
#endif

bool mailbox_open(struct mailbox *box, struct err *err)
{
    *box = (struct mailbox){.wake = {-1, -1}};
    box->last = &box->first;
    if (pipe(box->wake) != 0)
        return err_set(err, ERR_RESOURCE, "no file descriptor is free: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        fcntl(box->wake[i], F_SETFL, O_NONBLOCK);
        fcntl(box->wake[i], F_SETFD, FD_CLOEXEC);
    }
    pthread_mutex_init(&box->lock, NULL);
    return true;
}

void mailbox_free(struct mailbox *box)
{
    for (struct mail *mail = box->first, *next; mail; mail = next) {
        next = mail->next;
        mail_free(mail);
    }
    close(box->wake[0]);
    close(box->wake[1]);
    pthread_mutex_destroy(&box->lock);
}

struct mail *mail_new(enum mail_kind kind, size_t choice, const char *text, size_t len,
                      size_t top_count)
{
    struct mail *mail = mem_new(1, sizeof *mail + len + 1);
    mail->kind = kind;
    mail->choice = choice;
    mail->len = len;
    if (len)
        memcpy(mail->text, text, len);
    mail->top_count = top_count;
    if (top_count)
        mail->top = mem_new(top_count, sizeof *mail->top);
    return mail;
}

void mail_free(struct mail *mail)
{
    if (mail)
        free(mail->top);
    free(mail);
}

static size_t mail_bytes(const struct mail *mail)
{
    return sizeof *mail + mail->len + mail->top_count * sizeof *mail->top;
}

static void mailbox_signal(struct mailbox *box)
{
    if (!box->signalled && write(box->wake[1], "!", 1) == 1)
        box->signalled = true;
}

bool mailbox_post(struct mailbox *box, struct mail *mail)
{
    pthread_mutex_lock(&box->lock);
    bool fits = box->bytes + mail_bytes(mail) <= MAILBOX_MAX_BYTES;
    if (mail->kind == MAIL_TOKEN && !fits)
        box->overflowed = true;
    bool taken = mail->kind == MAIL_DONE || (fits && !box->closed && !box->overflowed);
    if (taken) {
        *box->last = mail;
        box->last = &mail->next;
        box->bytes += mail_bytes(mail);
        mailbox_signal(box);
    }
    pthread_mutex_unlock(&box->lock);
    if (!taken)
        mail_free(mail);
    return taken;
}

void mailbox_shut(struct mailbox *box)
{
    pthread_mutex_lock(&box->lock);
    box->closed = true;
    mailbox_signal(box);
    pthread_mutex_unlock(&box->lock);
}

/* Everything there is; null when there is nothing. */
static struct mail *mailbox_empty(struct mailbox *box, bool *closed)
{
    pthread_mutex_lock(&box->lock);
    struct mail *mail = box->first;
    box->first = NULL;
    box->last = &box->first;
    box->bytes = 0;
    *closed = box->closed;
    char byte;
    if (box->signalled && !box->closed && read(box->wake[0], &byte, 1) == 1)
        box->signalled = false;
    pthread_mutex_unlock(&box->lock);
    return mail;
}

/* What a read would find: MAILBOX_MAIL when the socket is fine. */
static enum mailbox_wait mailbox_peek(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        return MAILBOX_GONE;
    return n == 0 ? MAILBOX_HALF : MAILBOX_MAIL;
}

/* What the socket's events say; MAILBOX_MAIL when it is fine. */
static enum mailbox_wait mailbox_judge(struct mailbox *box, int fd, short events)
{
    if (events & (POLLERR | POLLNVAL) || (box->half && events & POLLHUP))
        return MAILBOX_GONE;
    enum mailbox_wait found = events & (POLLRDHUP | POLLHUP) ? MAILBOX_HALF : mailbox_peek(fd);
    box->half |= found == MAILBOX_HALF;
    return found;
}

enum mailbox_wait mailbox_take(struct mailbox *box, int fd, uint64_t deadline_ns, struct mail **out)
{
    /* Bytes of a next request may wait in the socket; then only its end is watched for, and after
     * that only what poll always tells: errors. */
    short watch = box->half ? 0 : POLLIN | POLLRDHUP;
    for (;;) {
        bool closed;
        *out = mailbox_empty(box, &closed);
        if (*out)
            return MAILBOX_MAIL;
        if (closed)
            return MAILBOX_CLOSED;
        uint64_t now = clock_now_ns();
        if (now >= deadline_ns)
            return MAILBOX_TIMEOUT;
        struct pollfd polled[2] = {{.fd = box->wake[0], .events = POLLIN},
                                   {.fd = fd, .events = watch}};
        uint64_t wait_ms = (deadline_ns - now) / 1000000 + 1;
        int n = poll(polled, fd >= 0 ? 2 : 1, wait_ms > 60000 ? 60000 : (int)wait_ms);
        if (n <= 0 || fd < 0 || !polled[1].revents)
            continue;
        enum mailbox_wait found = mailbox_judge(box, fd, polled[1].revents);
        if (found != MAILBOX_MAIL)
            return found;
        watch = POLLRDHUP;
    }
}
