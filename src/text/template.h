/* The chat template of the family, in C: a chat request to the exact prompt.
 * Byte-equal to Qwen3.6's chat_template.jinja, with one leniency: see template_render. */
#ifndef TEXT_TEMPLATE_H
#define TEXT_TEMPLATE_H

#include "base/buf.h"
#include "base/err.h"
#include "text/tokenizer.h"

#include <jansson.h>

struct template_options {
    bool add_generation_prompt;
    bool enable_thinking;
    bool preserve_thinking;
    bool add_vision_id;
};

/* A rendered prompt. `plain` are the stretches that came from the request (contents, reasoning,
 * names, argument values, tool definitions): added tokens are not recognised there. */
struct template_prompt {
    struct buf text;
    struct text_range *plain;
    size_t plain_count, plain_cap;
    size_t head_len;       /* bytes of the system+tools block; 0 when there is none */
    size_t generation_pos; /* where the generation prompt begins; text.len when there is none */
    bool thinking_open;    /* the prompt ends inside a think block */
};

/* messages: OpenAI chat messages; tools: array or null. Fails with ERR_USAGE in the template's own
 * words where the official one raises. The leniency: system and developer messages after the first
 * are accepted; leading ones are merged (contents trimmed, joined by a blank line, empty ones
 * dropped), later ones are rendered in place as system turns, and nothing else needs to come with
 * them. Tool-call arguments may be a mapping
 * or a JSON text of one; an empty text means none. An error names the message after the template's
 * words, in brackets. */
bool template_render(const json_t *messages, const json_t *tools,
                     const struct template_options *options, struct template_prompt *out,
                     struct err *err);

/* The tokens of a prompt, appended to `out`. keep_at: out, how many of them there are at the end of
 * the system+tools block and before the generation prompt, where later prompts may depart. */
bool template_tokenize(const struct template_prompt *prompt, const struct tokenizer *tokenizer,
                       struct token_list *out, uint32_t keep_at[2], struct err *err);

/* Overwrites the options that a request names, at its top level or in `chat_template_kwargs` (the
 * top level wins); null leaves an option as it is. Fails with ERR_USAGE for values that are not
 * booleans. */
bool template_read_options(const json_t *request, struct template_options *options,
                           struct err *err);

void template_prompt_free(struct template_prompt *prompt);

#endif
