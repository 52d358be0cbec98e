/* Owns nothing; none of these touches the device. */
#include "server/tools.h"

#include "server/answer.h"
#include "server/body.h"
#include "server/chat.h"
#include "server/fields.h"
#include "server/openai_chat.h"
#include "server/page.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { TOOLS_UNHEALTHY = 3 /* faults in a row */ };

static bool tools_read_body(struct exchange *x, const struct field *table, json_t **body,
                            struct fault *fault)
{
    if (!engine_tokenizer(x->server->engine))
        return fault_set_status(fault, 501, NULL, "the model folder has no tokenizer.json");
    if (!body_parse(x->body.data, x->body.len, body, fault))
        return false;
    return fields_check(*body, table, NULL, fault);
}

/* {"content": TEXT, "parse_special": false}: added tokens are plain text unless told otherwise. */
static bool tools_tokenize(const struct exchange *x, const json_t *body, struct token_list *ids,
                           struct fault *fault)
{
    json_t *text;
    bool special = false;
    struct err err = {0};
    if (!fields_read_typed(body, "content", JSON_STRING, &text, fault) ||
        !fields_read_bool(body, "parse_special", &special, fault))
        return false;
    if (!text)
        return fault_set(fault, "content", "'content' is missing");
    size_t n = json_string_length(text);
    struct text_range all = {0, n};
    return tokenizer_encode(engine_tokenizer(x->server->engine), json_string_value(text), n, &all,
                            special || !n ? 0 : 1, ids, &err) ||
           fault_from_err(fault, &err);
}

bool tools_handle_tokenize(struct exchange *x)
{
    static const struct field table[] = {{"content", FIELD_HONOURED},
                                         {"parse_special", FIELD_HONOURED},
                                         {"model", FIELD_IGNORED},
                                         {"add_special", FIELD_IGNORED},
                                         {NULL, 0}};
    struct fault fault = {0};
    struct token_list ids = {0};
    json_t *body = NULL;
    bool ok = tools_read_body(x, table, &body, &fault) && tools_tokenize(x, body, &ids, &fault);
    json_decref(body);
    /* As text at once: a value for each of millions of ids would take far more. */
    struct buf text = {.max = SIZE_MAX / 2};
    buf_printf(&text, "{\"count\":%zu,\"tokens\":[", ids.len);
    for (size_t i = 0; i < ids.len; i++) {
        char id[16];
        buf_append(&text, id, (size_t)snprintf(id, sizeof id, i ? ",%d" : "%d", ids.ids[i]));
    }
    buf_append_text(&text, "]}");
    token_list_free(&ids);
    if (ok)
        return exchange_reply_buf(x, 200, "application/json", &text);
    buf_free(&text);
    return exchange_reply_fault(x, &fault);
}

static bool tools_detokenize(const struct exchange *x, const json_t *body, struct buf *out,
                             struct fault *fault)
{
    json_t *list;
    struct detokenizer d = {.tokenizer = engine_tokenizer(x->server->engine)};
    if (!fields_read_typed(body, "tokens", JSON_ARRAY, &list, fault))
        return false;
    if (!list)
        return fault_set(fault, "tokens", "'tokens' is missing");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *id = json_array_get(list, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= tokenizer_vocab(d.tokenizer))
            return fault_set(fault, "tokens", "tokens[%zu] is not a token id below %u", i,
                             tokenizer_vocab(d.tokenizer));
        detokenizer_push(&d, (int32_t)json_integer_value(id), out);
    }
    detokenizer_finish(&d, out);
    return true;
}

bool tools_handle_detokenize(struct exchange *x)
{
    static const struct field table[] = {
        {"tokens", FIELD_HONOURED}, {"model", FIELD_IGNORED}, {NULL, 0}};
    struct fault fault = {0};
    struct buf text = {0};
    json_t *body = NULL;
    bool ok = tools_read_body(x, table, &body, &fault) && tools_detokenize(x, body, &text, &fault);
    json_t *reply = ok ? json_pack("{s:o}", "content", answer_buf_text(&text)) : NULL;
    buf_free(&text);
    json_decref(body);
    return ok ? exchange_reply_json(x, 200, reply) : exchange_reply_fault(x, &fault);
}

static bool tools_read_template(struct answer *a, struct fault *fault)
{
    struct chat chat;
    struct template_prompt prompt;
    struct err err = {0};
    chat_init(&chat, a);
    bool ok = fields_check(a->body, openai_chat_fields, NULL, fault) &&
              openai_chat_read_chat(a, &chat, fault) && chat_prepare(&chat, a, fault);
    if (ok && template_render(chat.messages, chat.choice == CHAT_NONE ? NULL : chat.tools,
                              &chat.options, &prompt, &err)) {
        a->items = json_pack("{s:o,s:I}", "prompt", answer_buf_text(&prompt.text), "tokens",
                             (json_int_t)a->prompts[0].len);
        template_prompt_free(&prompt);
    }
    chat_free(&chat);
    return ok;
}

bool tools_handle_template(struct exchange *x)
{
    struct fault fault = {0};
    struct answer *a = answer_read_only(x, tools_read_template, &fault);
    return a ? exchange_reply_json(x, 200, json_incref(a->items)) : exchange_reply_fault(x, &fault);
}

bool tools_handle_models(struct exchange *x)
{
    const struct server *server = x->server;
    json_t *model = json_pack("{s:s,s:s,s:I,s:s,s:I,s:I}", "id", server->options.model_name,
                              "object", "model", "created", (json_int_t)server->started, "owned_by",
                              "calla", "context_length", (json_int_t)engine_ctx(server->engine),
                              "max_model_len", (json_int_t)engine_ctx(server->engine));
    if (!strncmp(x->url, "/v1/models/", 11)) {
        struct fault fault = {0};
        if (!strcmp(x->url + 11, server->options.model_name))
            return exchange_reply_json(x, 200, model);
        json_decref(model);
        fault_set_status(&fault, 404, "model_not_found",
                         "there is no model '%.200s' here; this server's is '%.200s', and requests "
                         "for an answer may name it in any way",
                         x->url + 11, server->options.model_name);
        return exchange_reply_fault(x, &fault);
    }
    return exchange_reply_json(x, 200,
                               json_pack("{s:s,s:[o],s:b,s:s,s:s}", "object", "list", "data", model,
                                         "has_more", 0, "first_id", server->options.model_name,
                                         "last_id", server->options.model_name));
}

bool tools_handle_health(struct exchange *x)
{
    struct scheduler_stats stats;
    scheduler_read_stats(x->server->scheduler, &stats);
    bool bad = stats.faults_in_a_row >= TOOLS_UNHEALTHY;
    return exchange_reply_json(x, bad ? 503 : 200,
                               json_pack("{s:s,s:I,s:I,s:I}", "status", bad ? "unhealthy" : "ok",
                                         "running", (json_int_t)stats.running, "queued",
                                         (json_int_t)stats.queued, "faults_in_a_row",
                                         (json_int_t)stats.faults_in_a_row));
}

bool tools_handle_metrics(struct exchange *x)
{
    struct scheduler_stats stats;
    struct buf text = {0};
    scheduler_read_stats(x->server->scheduler, &stats);
    metrics_write(&x->server->metrics, &stats, &text);
    buf_printf(&text,
               "# HELP calla_body_bytes Bodies of the requests in work.\n"
               "# TYPE calla_body_bytes gauge\ncalla_body_bytes %llu\n",
               (unsigned long long)atomic_load(&x->server->bodies_bytes));
    bool ok = exchange_reply_text(x, 200, "text/plain; version=0.0.4", text.data, text.len);
    buf_free(&text);
    return ok;
}

/* What is in use and how much may be; without a disk tier, `dir` is null. */
static json_t *tools_describe_cache(const struct server *server)
{
    struct scheduler_stats s;
    scheduler_read_stats(server->scheduler, &s);
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:o,s:I,s:I,s:I}", "bytes",
                     (json_int_t)s.cache_bytes, "bytes_max", (json_int_t)s.cache_bytes_max,
                     "entries", (json_int_t)s.cache_entries, "hits", (json_int_t)s.cache_hits,
                     "misses", (json_int_t)s.cache_misses, "evictions",
                     (json_int_t)s.cache_evictions, "dir",
                     s.disk_bytes_max ? json_string(server->options.cache_dir) : json_null(),
                     "disk_bytes", (json_int_t)s.disk_bytes, "disk_bytes_max",
                     (json_int_t)s.disk_bytes_max, "disk_entries", (json_int_t)s.disk_entries);
}

bool tools_handle_props(struct exchange *x)
{
    const struct server *server = x->server;
    const struct server_options *o = &server->options;
    struct sampler_options s = engine_sampling(server->engine);
    json_t *sampling = json_pack(
        "{s:o,s:I,s:o,s:o,s:o,s:o,s:o}", "temperature", answer_float(s.temperature), "top_k",
        (json_int_t)s.top_k, "top_p", answer_float(s.top_p), "min_p", answer_float(s.min_p),
        "repetition_penalty", answer_float(s.repetition_penalty), "presence_penalty",
        answer_float(s.presence_penalty), "frequency_penalty", answer_float(s.frequency_penalty));
    json_t *cache = tools_describe_cache(server);
    json_t *limits = json_pack(
        "{s:I,s:I,s:I,s:I,s:I}", "body_bytes", (json_int_t)o->max_body_bytes, "connections",
        (json_int_t)o->max_connections, "queue", (json_int_t)o->queue, "request_seconds",
        (json_int_t)o->request_timeout_s, "choices", (json_int_t)ANSWER_MAX_CHOICES);
    return exchange_reply_json(
        x, 200,
        json_pack(
            "{s:s,s:s,s:I,s:I,s:I,s:I,s:b,s:o,s:o,s:o,s:b}", "model", o->model_name, "backend",
            engine_backend(server->engine), "context", (json_int_t)engine_ctx(server->engine),
            "chunk", (json_int_t)engine_chunk(server->engine), "parallel", (json_int_t)o->parallel,
            "vocab", (json_int_t)s.vocab, "thinking", engine_thinks(server->engine), "sampling",
            sampling, "cache", cache, "limits", limits, "api_key", o->api_key != NULL));
}

bool tools_handle_page(struct exchange *x)
{
    return exchange_reply_text(x, 200, "text/html; charset=utf-8", page_html, page_html_len);
}
