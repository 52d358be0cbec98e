/* The XML-like form of tool calls, as far as it can be read without knowing what comes next.
 *
 * The form has no escaping: a value is raw text, and only what surrounds a closing tag tells
 * whether it is one. A file that documents this very form can be a value. The rules, for a tag
 * in a value:
 *
 *  1. Blocks that open inside the value must close inside it. A <tool_call> opens one when a
 *     <function=...> follows it (only white space between), a <function=...> when a
 *     <parameter=...> or </function> follows it; a <parameter=...> in such a function, or alone
 *     at the start of a line and followed by a newline. Other openings count until the end of
 *     their line.
 *  2. Outside such blocks, </parameter> ends the value when, after white space, comes
 *     <parameter=KEY> with a key not given before, </function> and then </tool_call>,
 *     </tool_call>, a <tool_call> with a function, or the end of the text.
 *  3. A missing </parameter>: at the start of a line, </function> followed by </tool_call> or by
 *     the end of the text; </tool_call> followed by a call or by the end; a <parameter=KEY> line
 *     whose key the tool declares and that was not given before, unless it is only shown: a
 *     </parameter> that by rule 2 would not end it follows within MARKUP_SHOWN_MAX bytes.
 *     A lone <parameter=...> block that is open then does not keep </parameter> from being real.
 *  4. </function> followed by <function=...> is data: a second call needs its own <tool_call>.
 *     (Where the first one had none either, a declared function may follow.)
 *  5. A <function=...> block that no <tool_call> opened does not keep </function></tool_call>
 *     from ending the call when another call or the end of the text follows; nor does it keep a
 *     </parameter> that closes no parameter of its own from being judged by rule 2.
 *  6. At the end of the text, </parameter> and what closes after it are real whatever is open.
 *
 * Limits: a value with the closing tags of a whole call that it did not open is cut there, and so
 * is one with a lone line <parameter=KEY> of a declared key that comes later in the call, where it
 * is not only shown. No reader can tell these from a call: they are spelled the same. */
#ifndef TEXT_MARKUP_H
#define TEXT_MARKUP_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

enum markup_answer {
    MARKUP_NO,
    MARKUP_YES,
    MARKUP_MORE /* only more text can tell */
};

/* Text that may go on behind p[n); `at` is how far it has been read. */
struct markup_text {
    const char *p;
    size_t n, at;
    bool ended; /* nothing follows: MARKUP_MORE is never answered */
};

enum {
    MARKUP_GAP_MAX = 64,     /* white space between two tags of the form */
    MARKUP_NAME_MAX = 256,   /* bytes of a function's or a parameter's name */
    MARKUP_SHOWN_MAX = 1024, /* bytes in which a parameter that a value only shows is closed */
};

/* Reads `tag`; on any answer but MARKUP_YES nothing is read. */
enum markup_answer markup_read(struct markup_text *text, const char *tag);

/* Reads `<function=NAME>` or `<parameter=NAME>`, `open` being the part before the name. */
enum markup_answer markup_read_named(struct markup_text *text, const char *open, const char **name,
                                     size_t *n);

/* Skips white space; MARKUP_NO when there is too much of it. */
enum markup_answer markup_skip_gap(struct markup_text *text);

/* True when everything has been read and nothing follows. */
bool markup_at_end(const struct markup_text *text);

/* Answers YES when the text begins with the head of a call: `<tool_call>` (unless `bare`), the
 * function's opening tag, and a parameter or a closing tag after it. Then the name is given, and
 * `at` is behind the function's opening tag. */
enum markup_answer markup_read_call(struct markup_text *text, bool bare, const char **name,
                                    size_t *n);

/* Where a call stands while one of its values is read. */
struct markup_call {
    const json_t *tools;    /* or null */
    const json_t *function; /* the tool's definition, or null */
    const json_t *given;    /* object: the keys so far, with the current one */
    bool bare;              /* it began without <tool_call> */
};

enum { MARKUP_DEPTH = 64 /* open blocks in a value; more are not followed */ };

/* What has been seen of a value. Zeroed at its start but for line_start, which is true. */
struct markup_value {
    unsigned char open[MARKUP_DEPTH]; /* [depth] enum markup_tag: blocks that are open */
    size_t depth;
    size_t inline_open; /* <parameter=...> on this line outside blocks */
    int last;        /* enum markup_tag of the last tag, when only white space follows it; else 0 */
    bool line_start; /* only blanks since the last newline */
    bool inline_form; /* the value began on the line of its opening tag */
};

/* Notes bytes of the value that hold no '<'. */
void markup_value_note(struct markup_value *value, const char *p, size_t n);

/* The text is at a '<' in a value. YES: the value ends before it, and *n bytes (the closing tag, or
 * none) belong to the end. NO: the next *n bytes are part of the value. */
enum markup_answer markup_value_tag(struct markup_value *value, const struct markup_call *call,
                                    struct markup_text text, size_t *n);

#endif
