/* Owns the vocabulary tables and how they are read from tokenizer.json.
 *
 * tokenizer.json spells bytes as printable characters (the GPT-2 byte-level alphabet). Everything
 * here is turned into raw bytes at once; nothing after this file knows that alphabet. Invariant of
 * an open vocabulary: all 256 single bytes have ids, every merge names ids below count, and the
 * added tokens are exactly the entries flagged VOCAB_ADDED. */
#include "text/vocab.h"

#include "base/file.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "text/split.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static uint32_t vocab_hash_bytes(const char *bytes, size_t n)
{
    uint64_t h = 0x9e3779b97f4a7c15u ^ n;
    for (; n >= 8; bytes += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, bytes, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    uint64_t w = 0;
    memcpy(&w, bytes, n);
    h = (h ^ w) * 0xc4ceb9fe1a85ec53u;
    return (uint32_t)(h >> 32 ^ h);
}

static uint32_t vocab_hash_pair(int32_t left, int32_t right)
{
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32 ^ h >> 13);
}

/* A power of two that keeps a table of n entries at most half full. */
static uint32_t vocab_table_size(size_t n)
{
    uint32_t size = 64;
    while (size < 2 * n)
        size *= 2;
    return size;
}

int32_t vocab_find(const struct vocab *vocab, const char *bytes, size_t n)
{
    uint32_t i = vocab_hash_bytes(bytes, n) & vocab->slot_mask;
    for (int32_t id; (id = vocab->slots[i]) >= 0; i = (i + 1) & vocab->slot_mask) {
        const struct vocab_entry *e = &vocab->entries[id];
        if (e->len == n && !memcmp(vocab->bytes.data + e->start, bytes, n))
            return id;
    }
    return -1;
}

static void vocab_index(struct vocab *vocab, int32_t id)
{
    const struct vocab_entry *e = &vocab->entries[id];
    uint32_t i = vocab_hash_bytes(vocab->bytes.data + e->start, e->len) & vocab->slot_mask;
    while (vocab->slots[i] >= 0)
        i = (i + 1) & vocab->slot_mask;
    vocab->slots[i] = id;
}

const struct vocab_merge *vocab_find_merge(const struct vocab *vocab, int32_t left, int32_t right)
{
    uint32_t i = vocab_hash_pair(left, right) & vocab->merge_mask;
    for (; vocab->merges[i].left >= 0; i = (i + 1) & vocab->merge_mask)
        if (vocab->merges[i].left == left && vocab->merges[i].right == right)
            return &vocab->merges[i];
    return NULL;
}

/* A pair that is listed twice keeps its last rank, as in the `tokenizers` package. */
static void vocab_add_merge(struct vocab *vocab, struct vocab_merge merge)
{
    uint32_t i = vocab_hash_pair(merge.left, merge.right) & vocab->merge_mask;
    while (vocab->merges[i].left >= 0 &&
           (vocab->merges[i].left != merge.left || vocab->merges[i].right != merge.right))
        i = (i + 1) & vocab->merge_mask;
    vocab->merges[i] = merge;
}

int32_t vocab_match_added(const struct vocab *vocab, const char *p, size_t n)
{
    if (!n || !vocab->added_first[(unsigned char)*p])
        return -1;
    for (uint32_t i = 0; i < vocab->added_count; i++) {
        const struct vocab_entry *e = &vocab->entries[vocab->added[i]];
        if (e->len <= n && !memcmp(vocab->bytes.data + e->start, p, e->len))
            return vocab->added[i];
    }
    return -1;
}

/* The byte that a code point of the byte-level alphabet stands for; -1 for any other. Printable
 * Latin-1 stands for itself; the other 68 bytes, in order, are U+0100 and up. */
static int vocab_byte_of(uint32_t cp)
{
    if ((cp >= 33 && cp <= 126) || (cp >= 161 && cp <= 172) || (cp >= 174 && cp <= 255))
        return (int)cp;
    if (cp < 256 || cp >= 256 + 68)
        return -1;
    uint32_t k = cp - 256;
    return (int)(k < 33 ? k : k < 67 ? 127 + k - 33 : 173);
}

/* Appends the bytes that a byte-level spelling stands for; false (and nothing appended) when it
 * has a character outside the alphabet. */
static bool vocab_append_spelled(struct buf *out, const char *text, size_t n)
{
    size_t start = out->len;
    while (n) {
        uint32_t cp;
        size_t k = utf8_decode(text, n, &cp);
        int byte = k ? vocab_byte_of(cp) : -1;
        if (byte < 0) {
            out->len = start;
            return false;
        }
        buf_append_char(out, (char)byte);
        text += k;
        n -= k;
    }
    return true;
}

/* Grows the id table so that id is in it. */
static bool vocab_reserve(struct vocab *vocab, json_int_t id, const char *text, struct err *err)
{
    if (id < 0 || id > VOCAB_MAX_ID)
        return err_set(err, ERR_INPUT, "token '%.60s' has id %lld; ids from 0 to %d are supported",
                       text, (long long)id, VOCAB_MAX_ID);
    uint32_t need = (uint32_t)id + 1;
    if (need <= vocab->count)
        return true;
    if (need > vocab->cap) {
        vocab->cap = need < 2 * vocab->cap ? 2 * vocab->cap : need;
        vocab->entries = mem_grow(vocab->entries, vocab->cap, sizeof *vocab->entries);
    }
    memset(vocab->entries + vocab->count, 0, (need - vocab->count) * sizeof *vocab->entries);
    vocab->count = need;
    return true;
}

static bool vocab_read_entries(struct vocab *vocab, json_t *table, struct err *err)
{
    const char *text;
    json_t *value;
    json_int_t highest = -1;
    json_object_foreach(table, text, value)
    {
        if (!json_is_integer(value))
            return err_set(err, ERR_INPUT, "the id of token '%.60s' is not a whole number", text);
        if (json_integer_value(value) > highest)
            highest = json_integer_value(value);
    }
    if (highest < 0)
        return err_set(err, ERR_INPUT, "model.vocab has no entry");
    if (!vocab_reserve(vocab, highest, "of the highest id", err))
        return false;
    json_object_foreach(table, text, value)
    {
        json_int_t id = json_integer_value(value);
        if (id < 0 || vocab->entries[id].flags)
            return err_set(err, ERR_INPUT, "token '%.60s' has id %lld, which is %s", text,
                           (long long)id, id < 0 ? "negative" : "taken by another token");
        struct vocab_entry *e = &vocab->entries[id];
        size_t n = strlen(text);
        e->start = (uint32_t)vocab->bytes.len;
        /* BPE cannot produce a token spelled otherwise; decoding gives its text as it stands. */
        if (!vocab_append_spelled(&vocab->bytes, text, n))
            buf_append(&vocab->bytes, text, n);
        e->len = (uint32_t)vocab->bytes.len - e->start;
        e->flags = VOCAB_PRESENT;
    }
    return true;
}

/* One added token, from either file. Both files may name it, but they must agree. `normalized`
 * makes no difference here: it asks for a match after form C, and form C yields no such text from
 * another but for a few look-alikes of ASCII. */
static bool vocab_read_added(struct vocab *vocab, json_int_t id, json_t *token, struct err *err)
{
    static const char *const refused[] = {"lstrip", "rstrip", "single_word"};
    const char *text = json_string_value(json_object_get(token, "content"));
    if (!text || !*text)
        return err_set(err, ERR_INPUT, "the added token with id %lld has no content",
                       (long long)id);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (json_is_true(json_object_get(token, refused[i])))
            return err_set(err, ERR_INPUT, "added token '%.60s' has %s set, which is not supported",
                           text, refused[i]);
    if (!vocab_reserve(vocab, id, text, err))
        return false;
    struct vocab_entry *e = &vocab->entries[id];
    size_t n = strlen(text);
    if (e->flags && (e->len != n || memcmp(vocab->bytes.data + e->start, text, n)))
        return err_set(err, ERR_INPUT, "id %lld is both '%.*s' and added token '%.60s'",
                       (long long)id, (int)(e->len < 60 ? e->len : 60),
                       vocab->bytes.data + e->start, text);
    if (!e->flags) {
        e->start = (uint32_t)vocab->bytes.len;
        e->len = (uint32_t)n;
        buf_append(&vocab->bytes, text, n);
    }
    if (!(e->flags & VOCAB_ADDED)) {
        if (vocab->added_count == VOCAB_MAX_ADDED)
            return err_set(err, ERR_INPUT,
                           "there are more than %d added tokens, which is the most "
                           "that are supported",
                           VOCAB_MAX_ADDED);
        if (vocab->added_count == vocab->added_cap) {
            vocab->added_cap = vocab->added_cap ? 2 * vocab->added_cap : 64;
            vocab->added = mem_grow(vocab->added, vocab->added_cap, sizeof *vocab->added);
        }
        vocab->added[vocab->added_count++] = (int32_t)id;
        vocab->added_first[(unsigned char)*text] = true;
    }
    e->flags |= VOCAB_PRESENT | VOCAB_ADDED;
    if (json_is_true(json_object_get(token, "special")))
        e->flags |= VOCAB_SPECIAL;
    return true;
}

static int vocab_compare_keys(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Longest first, so that the first that matches is the longest. */
static void vocab_sort_added(struct vocab *vocab)
{
    uint64_t *key = mem_new(vocab->added_count, sizeof *key);
    for (uint32_t i = 0; i < vocab->added_count; i++) {
        uint32_t id = (uint32_t)vocab->added[i];
        key[i] = (uint64_t)(UINT32_MAX - vocab->entries[id].len) << 32 | id;
    }
    qsort(key, vocab->added_count, sizeof *key, vocab_compare_keys);
    for (uint32_t i = 0; i < vocab->added_count; i++)
        vocab->added[i] = (int32_t)(uint32_t)key[i];
    free(key);
}

static bool vocab_build_index(struct vocab *vocab, struct err *err)
{
    uint32_t size = vocab_table_size(vocab->count);
    vocab->slots = mem_new(size, sizeof *vocab->slots);
    memset(vocab->slots, 0xff, size * sizeof *vocab->slots);
    vocab->slot_mask = size - 1;
    vocab_sort_added(vocab);
    for (uint32_t i = 0; i < vocab->added_count; i++) {
        const struct vocab_entry *e = &vocab->entries[vocab->added[i]];
        int32_t other = vocab_find(vocab, vocab->bytes.data + e->start, e->len);
        if (other >= 0)
            return err_set(err, ERR_INPUT, "added token '%.*s' has two ids, %d and %d",
                           (int)(e->len < 60 ? e->len : 60), vocab->bytes.data + e->start, other,
                           vocab->added[i]);
        vocab_index(vocab, vocab->added[i]);
    }
    for (uint32_t id = 0; id < vocab->count; id++)
        if (vocab->entries[id].flags == VOCAB_PRESENT)
            vocab_index(vocab, (int32_t)id);
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        vocab->byte_ids[b] = vocab_find(vocab, &c, 1);
        if (vocab->byte_ids[b] < 0)
            return err_set(err, ERR_INPUT, "model.vocab lacks a token for the byte 0x%02x", b);
    }
    return true;
}

/* Splits a merge, "left right" or ["left", "right"], into its two spellings. */
static bool vocab_merge_sides(json_t *merge, const char *side[2], size_t len[2])
{
    if (json_is_string(merge)) {
        const char *text = json_string_value(merge), *space = strchr(text, ' ');
        if (!space || strchr(space + 1, ' '))
            return false;
        side[0] = text;
        len[0] = (size_t)(space - text);
        side[1] = space + 1;
        len[1] = strlen(space + 1);
        return true;
    }
    if (json_array_size(merge) != 2)
        return false;
    for (int i = 0; i < 2; i++) {
        side[i] = json_string_value(json_array_get(merge, (size_t)i));
        if (!side[i])
            return false;
        len[i] = strlen(side[i]);
    }
    return true;
}

static bool vocab_read_merges(struct vocab *vocab, json_t *list, struct err *err)
{
    size_t n = json_array_size(list);
    uint32_t size = vocab_table_size(n);
    vocab->merges = mem_new(size, sizeof *vocab->merges);
    vocab->merge_mask = size - 1;
    for (uint32_t i = 0; i < size; i++)
        vocab->merges[i].left = -1;
    struct buf text = {0};
    for (size_t rank = 0; rank < n; rank++) {
        const char *side[2];
        size_t len[2];
        struct vocab_merge merge = {.left = -1, .right = -1, .rank = (int32_t)rank, .id = -1};
        buf_clear(&text);
        if (vocab_merge_sides(json_array_get(list, rank), side, len) &&
            vocab_append_spelled(&text, side[0], len[0])) {
            size_t cut = text.len;
            if (vocab_append_spelled(&text, side[1], len[1]) && cut && text.len > cut) {
                merge.left = vocab_find(vocab, text.data, cut);
                merge.right = vocab_find(vocab, text.data + cut, text.len - cut);
                merge.id = vocab_find(vocab, text.data, text.len);
            }
        }
        if (merge.left < 0 || merge.right < 0 || merge.id < 0) {
            buf_free(&text);
            return err_set(err, ERR_INPUT,
                           "model.merges[%zu] is neither \"left right\" nor [\"left\", \"right\"] "
                           "with both sides and the result in model.vocab",
                           rank);
        }
        vocab_add_merge(vocab, merge);
    }
    buf_free(&text);
    return true;
}

static bool vocab_is_type(json_t *object, const char *type)
{
    const char *have = json_string_value(json_object_get(object, "type"));
    return have && !strcmp(have, type);
}

static const char *vocab_type_name(json_t *object)
{
    const char *have = json_string_value(json_object_get(object, "type"));
    return have ? have : "none";
}

/* Whether text is cut up by the one pattern that split.c implements, then spelled as bytes. */
static bool vocab_check_pre_tokenizer(json_t *pre, struct err *err)
{
    json_t *steps = json_object_get(pre, "pretokenizers");
    json_t *split = json_array_get(steps, 0), *bytes = json_array_get(steps, 1);
    if (!vocab_is_type(pre, "Sequence") || json_array_size(steps) != 2 ||
        !vocab_is_type(split, "Split") || !vocab_is_type(bytes, "ByteLevel"))
        return err_set(err, ERR_INPUT,
                       "pre_tokenizer is %s; a Sequence of Split and ByteLevel is supported",
                       vocab_type_name(pre));
    const char *pattern =
        json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    const char *behavior = json_string_value(json_object_get(split, "behavior"));
    if (!pattern || strcmp(pattern, SPLIT_PATTERN) || !behavior || strcmp(behavior, "Isolated") ||
        json_is_true(json_object_get(split, "invert")))
        return err_set(err, ERR_INPUT,
                       "pre_tokenizer splits by '%.200s', which is not the pattern of qwen3_5_moe",
                       pattern ? pattern : "no Regex");
    if (json_is_true(json_object_get(bytes, "add_prefix_space")) ||
        !json_is_false(json_object_get(bytes, "use_regex")))
        return err_set(err, ERR_INPUT,
                       "pre_tokenizer ByteLevel with add_prefix_space or use_regex is not "
                       "supported");
    return true;
}

/* Refuses what would give other ids than the ones this code computes. */
static bool vocab_check_kind(json_t *root, struct err *err)
{
    static const char *const refused[] = {"dropout", "continuing_subword_prefix",
                                          "end_of_word_suffix"};
    json_t *model = json_object_get(root, "model");
    json_t *normalizer = json_object_get(root, "normalizer");
    if (!vocab_is_type(model, "BPE"))
        return err_set(err, ERR_INPUT, "model.type is %s; BPE is supported",
                       vocab_type_name(model));
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        json_t *value = json_object_get(model, refused[i]);
        if (json_is_real(value) || json_string_length(value))
            return err_set(err, ERR_INPUT, "model.%s is set, which is not supported", refused[i]);
    }
    if (json_is_true(json_object_get(model, "ignore_merges")))
        return err_set(err, ERR_INPUT, "model.ignore_merges is set, which is not supported");
    if (!vocab_is_type(normalizer, "NFC"))
        return err_set(err, ERR_INPUT, "normalizer is %s; NFC is supported",
                       vocab_type_name(normalizer));
    if (!json_is_object(json_object_get(model, "vocab")) ||
        !json_is_array(json_object_get(model, "merges")))
        return err_set(err, ERR_INPUT, "model.vocab or model.merges is missing");
    return vocab_check_pre_tokenizer(json_object_get(root, "pre_tokenizer"), err);
}

static json_t *vocab_load_json(const char *path, struct err *err)
{
    struct file_map map;
    if (!file_map_open(path, &map, err))
        return NULL;
    if (map.bytes > VOCAB_MAX_FILE) {
        err_set(err, ERR_INPUT, "has %zu bytes; at most %d are read", map.bytes, VOCAB_MAX_FILE);
        file_map_close(&map);
        return NULL;
    }
    json_error_t why;
    json_t *root = json_loadb(map.data ? (const char *)map.data : "", map.bytes, 0, &why);
    file_map_close(&map);
    if (!json_is_object(root)) {
        err_set(err, ERR_INPUT, "not a JSON object: %s (line %d)",
                root ? "another kind of value" : why.text, root ? 1 : why.line);
        json_decref(root);
        return NULL;
    }
    return root;
}

static bool vocab_read_config(struct vocab *vocab, json_t *root, struct err *err)
{
    const char *key;
    json_t *token;
    json_object_foreach(json_object_get(root, "added_tokens_decoder"), key, token)
    {
        char *end;
        long long id = strtoll(key, &end, 10);
        if (!*key || *end)
            return err_set(err, ERR_INPUT, "added_tokens_decoder: '%.60s' is not an id", key);
        if (!vocab_read_added(vocab, id, token, err))
            return false;
    }
    return true;
}

static bool vocab_read(struct vocab *vocab, json_t *root, const char *config_path, struct err *err)
{
    json_t *model = json_object_get(root, "model"), *token;
    size_t i;
    if (!vocab_check_kind(root, err) ||
        !vocab_read_entries(vocab, json_object_get(model, "vocab"), err))
        return false;
    json_array_foreach(json_object_get(root, "added_tokens"), i, token)
    {
        json_t *id = json_object_get(token, "id");
        if (!vocab_read_added(vocab, json_is_integer(id) ? json_integer_value(id) : -1, token, err))
            return false;
    }
    bool there;
    if (!file_find_regular(config_path, &there, err))
        return false;
    if (there) {
        json_t *config = vocab_load_json(config_path, err);
        bool ok = config && vocab_read_config(vocab, config, err);
        json_decref(config);
        if (!ok)
            return err_wrap(err, "tokenizer_config.json");
    }
    if (vocab->bytes.full)
        return err_set(err, ERR_INPUT, "the tokens' text is larger than %zu bytes",
                       (size_t)BUF_MAX_DEFAULT);
    return vocab_build_index(vocab, err) &&
           vocab_read_merges(vocab, json_object_get(model, "merges"), err);
}

bool vocab_open(const char *folder, struct vocab *vocab, struct err *err)
{
    *vocab = (struct vocab){0};
    char *path = file_join(folder, "tokenizer.json");
    char *config_path = file_join(folder, "tokenizer_config.json");
    json_t *root = vocab_load_json(path, err);
    bool ok = root && vocab_read(vocab, root, config_path, err);
    json_decref(root);
    if (!ok)
        err_wrap(err, "%s", path);
    free(path);
    free(config_path);
    return ok;
}

void vocab_close(struct vocab *vocab)
{
    buf_free(&vocab->bytes);
    free(vocab->entries);
    free(vocab->slots);
    free(vocab->merges);
    free(vocab->added);
    *vocab = (struct vocab){0};
}
