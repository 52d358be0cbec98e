/* Owns the editor, its history and the signal handlers while a chat runs on a terminal.
 *
 * libedit edits one line and knows nothing of pasted blocks, but it shows newlines that are in
 * its buffer. So the terminal is asked to mark pasted blocks, and the mark is bound to a
 * function that takes the block into the buffer in one go. Characters are read here: that way an
 * interrupt is never lost between looking for it and waiting (signals are let in only while
 * pselect waits), and UTF-8 is read whatever the locale says. */
#include "cmd/line.h"

#include "base/mem.h"
#include "base/utf8.h"

#include <errno.h>
#include <histedit.h>
#include <langinfo.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LINE_HISTORY_MAX = 1000,
    LINE_PASTE_MAX = 1 << 24, /* characters */
    LINE_TERMINATE = 1000,    /* interrupts that a request to terminate stands for */
};

static const int line_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGWINCH};

enum { LINE_SIGNALS = sizeof line_signals / sizeof *line_signals };

struct line {
    EditLine *editor;
    History *history;
    char *history_path;
    const char *prompt;
    bool interrupted, had_text;
    struct sigaction old[LINE_SIGNALS];
};

static volatile sig_atomic_t line_interrupt_count, line_resized;
static pthread_t line_thread; /* the one that waits for keys */

/* The system gives a signal to any thread that lets it in, and the threads of the engine do. It is
 * passed on, else a wait for keys that begins at this moment would not end. */
static void line_on_signal(int number)
{
    if (!pthread_equal(pthread_self(), line_thread))
        pthread_kill(line_thread, number);
    else if (number == SIGWINCH)
        line_resized = 1;
    else if (line_interrupt_count < LINE_TERMINATE)
        line_interrupt_count += number == SIGINT ? 1 : LINE_TERMINATE;
}

int line_interrupts(void)
{
    return line_interrupt_count;
}

int line_take_interrupts(void)
{
    int n = line_interrupt_count;
    line_interrupt_count = 0;
    return n;
}

/* Waits for a byte; false at the end of input or on an interrupt. */
static bool line_read_byte(EditLine *editor, char *byte)
{
    sigset_t mask;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    for (int i = 0; i < LINE_SIGNALS; i++)
        sigdelset(&mask, line_signals[i]);
    while (!line_interrupt_count) {
        if (line_resized) {
            line_resized = 0;
            el_resize(editor);
        }
        fd_set set;
        FD_ZERO(&set);
        FD_SET(STDIN_FILENO, &set);
        if (pselect(STDIN_FILENO + 1, &set, NULL, NULL, NULL, &mask) < 0) {
            if (errno != EINTR)
                return false;
            continue;
        }
        ssize_t n = read(STDIN_FILENO, byte, 1);
        if (n == 1)
            return true;
        if (n == 0 || (errno != EINTR && errno != EAGAIN))
            return false;
    }
    return false;
}

/* libedit's reader of characters; an interrupt comes as Ctrl-C. */
static int line_read_char(EditLine *editor, wchar_t *out)
{
    char bytes[4];
    size_t n = 0;
    uint32_t cp;
    do {
        if (!line_read_byte(editor, bytes + n)) {
            *out = 3;
            return line_interrupt_count && line_interrupt_count < LINE_TERMINATE ? 1 : 0;
        }
        n++;
    } while (!utf8_decode(bytes, n, &cp) && utf8_incomplete_tail(bytes, n) == n);
    *out = utf8_decode(bytes, n, &cp) ? (wchar_t)cp : 0xfffd;
    return 1;
}

static struct line *line_of(EditLine *editor)
{
    void *line = NULL;
    el_get(editor, EL_CLIENTDATA, &line);
    return line;
}

static unsigned char line_do_interrupt(EditLine *editor, int c)
{
    (void)c;
    struct line *line = line_of(editor);
    const LineInfo *info = el_line(editor);
    line->interrupted = true;
    line->had_text = info->lastchar > info->buffer;
    line_take_interrupts();
    return CC_EOF;
}

static unsigned char line_do_newline(EditLine *editor, int c)
{
    (void)c;
    return el_winsertstr(editor, L"\n") ? CC_ERROR : CC_REFRESH;
}

/* Takes a pasted block up to its end mark. Terminals send a line's end as CR, LF or both, and the
 * editor's terminal mode swaps the two. */
static unsigned char line_do_paste(EditLine *editor, int c)
{
    static const wchar_t mark[] = L"\033[201~";
    size_t len = 0, cap = 0, marked = wcslen(mark);
    wchar_t *text = NULL, one, last = 0;
    (void)c;
    while (line_read_char(editor, &one) == 1 && !line_interrupt_count) {
        bool second = (one == '\n' && last == '\r') || (one == '\r' && last == '\n');
        last = second ? 0 : one;
        if (second || len >= LINE_PASTE_MAX)
            continue;
        if (len + 2 > cap)
            text = mem_grow(text, cap = cap ? 2 * cap : 256, sizeof *text);
        text[len++] = one == '\r' ? '\n' : one;
        text[len] = 0;
        if (len >= marked && !wcscmp(text + len - marked, mark)) {
            text[len -= marked] = 0;
            break;
        }
    }
    /* The editor's line is a C string: what would end or garble it is left out. */
    size_t kept = 0;
    for (size_t i = 0; i < len; i++)
        if (text[i] == '\n' || text[i] == '\t' || (text[i] >= 0x20 && text[i] != 0x7f))
            text[kept++] = text[i];
    if (kept) {
        text[kept] = 0;
        el_winsertstr(editor, text);
    }
    free(text);
    return CC_REFRESH;
}

static char *line_give_prompt(EditLine *editor)
{
    return (char *)line_of(editor)->prompt;
}

/* The editor shows what the locale can encode. */
static void line_set_locale(void)
{
    static const char *const names[] = {"C.UTF-8", "en_US.UTF-8", "UTF-8"};
    setlocale(LC_CTYPE, "");
    for (size_t i = 0; i < 3 && strcmp(nl_langinfo(CODESET), "UTF-8") != 0; i++)
        setlocale(LC_CTYPE, names[i]);
}

static void line_bind(EditLine *editor)
{
    el_set(editor, EL_EDITOR, "emacs");
    el_set(editor, EL_ADDFN, "calla-interrupt", "interrupt", line_do_interrupt);
    el_set(editor, EL_ADDFN, "calla-newline", "insert a newline", line_do_newline);
    el_set(editor, EL_ADDFN, "calla-paste", "take a pasted block", line_do_paste);
    el_set(editor, EL_BIND, "^C", "calla-interrupt", NULL);
    el_set(editor, EL_BIND, "\\e\\n", "calla-newline", NULL);
    el_set(editor, EL_BIND, "\\e\\r", "calla-newline", NULL);
    el_set(editor, EL_BIND, "\\e[200~", "calla-paste", NULL);
    el_set(editor, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(editor, EL_BIND, "\\e[3~", "ed-delete-next-char", NULL);
    el_set(editor, EL_BIND, "\\e[1~", "ed-move-to-beg", NULL);
    el_set(editor, EL_BIND, "\\e[4~", "ed-move-to-end", NULL);
    el_set(editor, EL_BIND, "\\e[H", "ed-move-to-beg", NULL);
    el_set(editor, EL_BIND, "\\e[F", "ed-move-to-end", NULL);
}

bool line_open(const char *history_path, struct line **out, struct err *err)
{
    line_set_locale();
    struct line *line = mem_new(1, sizeof *line);
    HistEvent event;
    line->editor = el_init("calla", stdin, stdout, stderr);
    line->history = history_init();
    if (!line->editor || !line->history) {
        if (line->editor)
            el_end(line->editor);
        if (line->history)
            history_end(line->history);
        free(line);
        return err_set(err, ERR_INTERNAL, "cannot set up line editing on this terminal");
    }
    history(line->history, &event, H_SETSIZE, LINE_HISTORY_MAX);
    history(line->history, &event, H_SETUNIQUE, 1);
    if (history_path) {
        line->history_path = mem_copy_text(history_path, strlen(history_path));
        history(line->history, &event, H_LOAD, history_path);
    }
    el_set(line->editor, EL_CLIENTDATA, line);
    el_set(line->editor, EL_PROMPT, line_give_prompt);
    el_set(line->editor, EL_HIST, history, line->history);
    el_set(line->editor, EL_GETCFN, line_read_char);
    line_bind(line->editor);
    /* Where a terminal inserts, the editor loses count of wide characters; redrawn, it does not. */
    static const char *const inserts[] = {"ic", "IC", "im", "dc", "DC", "dm"};
    for (size_t i = 0; i < sizeof inserts / sizeof *inserts; i++)
        el_set(line->editor, EL_SETTC, inserts[i], "", NULL);
    line_thread = pthread_self();
    struct sigaction action = {.sa_handler = line_on_signal};
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < LINE_SIGNALS; i++)
        sigaction(line_signals[i], &action, &line->old[i]);
    *out = line;
    return true;
}

void line_close(struct line *line)
{
    if (!line)
        return;
    if (line->history_path) {
        HistEvent event;
        mode_t old = umask(077);
        history(line->history, &event, H_SAVE, line->history_path);
        umask(old);
    }
    for (int i = 0; i < LINE_SIGNALS; i++)
        sigaction(line_signals[i], &line->old[i], NULL);
    el_end(line->editor);
    history_end(line->history);
    free(line->history_path);
    free(line);
}

/* One run of the editor: up to Enter. */
static enum line_result line_read_part(struct line *line, const char *prompt, struct buf *out)
{
    int n = 0;
    line->prompt = prompt;
    line->interrupted = false;
    /* Before the prompt: el_gets itself switches the terminal after it, and what is typed or pasted
     * in between would be echoed and have its line ends changed. */
    el_set(line->editor, EL_PREP_TERM, 1);
    const char *text = el_gets(line->editor, &n);
    if (line->interrupted) {
        fputs("^C\n", stdout);
        return line->had_text ? LINE_DROPPED : LINE_INTERRUPT;
    }
    if (!text || n <= 0)
        return LINE_END;
    buf_append(out, text, (size_t)n - (text[n - 1] == '\n'));
    return LINE_TEXT;
}

enum line_result line_read(struct line *line, const char *prompt, struct buf *out)
{
    sigset_t blocked, old;
    sigemptyset(&blocked);
    for (int i = 0; i < LINE_SIGNALS; i++)
        sigaddset(&blocked, line_signals[i]);
    sigprocmask(SIG_BLOCK, &blocked, &old);
    fputs("\033[?2004h", stdout); /* mark pasted blocks */
    fflush(stdout);
    buf_clear(out);
    enum line_result result = line_read_part(line, prompt, out);
    while (result == LINE_TEXT && out->len && out->data[out->len - 1] == '\\') {
        out->data[out->len - 1] = '\n';
        result = line_read_part(line, ". ", out);
        if (result == LINE_INTERRUPT)
            result = LINE_DROPPED;
    }
    fputs("\033[?2004l", stdout);
    fflush(stdout);
    sigprocmask(SIG_SETMASK, &old, NULL);
    if (result == LINE_TEXT && out->len) {
        HistEvent event;
        history(line->history, &event, H_ENTER, out->data);
    }
    return result;
}
