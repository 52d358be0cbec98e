/* What masks cost with the vocabulary of Qwen3.6: 248,044 tokens and the added ones, built from
 * tests/data/tokenizer (see tests/e2e/test_tokenizer.py for the recipe). The times are printed;
 * docs/grammar.md quotes them. */
#include "text/grammar.h"

#include "base/file.h"
#include "base/mem.h"
#include "spent.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__)
enum { SLOWER = 10 };
#else
enum { SLOWER = 1 };
#endif

enum { GAPS = 256, LINES_MAX = 1 << 23 };

static struct tokenizer *tokenizer;
static struct grammar_vocab *vocab;
static float *logits;

/* ---- the tokenizer ------------------------------------------------------------------------- */

static json_t *speed_read_json(const char *path)
{
    struct buf text = {0};
    struct err err;
    assert_true(file_read(path, LINES_MAX, &text, &err));
    json_t *value = json_loadb(text.data, text.len, 0, NULL);
    assert_non_null(value);
    buf_free(&text);
    return value;
}

static void speed_write_json(const char *folder, const char *name, const json_t *value)
{
    char *path = file_join(folder, name);
    assert_int_equal(json_dump_file(value, path, JSON_COMPACT), 0);
    free(path);
}

static void speed_remove(const char *folder, const char *name)
{
    char *path = file_join(folder, name);
    unlink(path);
    free(path);
}

/* The next line of *at, cut at its newline; null at the end. */
static char *speed_line(char **at)
{
    char *line = *at, *end = strchr(line, '\n');
    if (!end)
        return NULL;
    *end = 0;
    *at = end + 1;
    return line;
}

/* The text of a gap in byte-level spelling is not needed to time masks: a placeholder stands there,
 * as it does where the text is unknown. */
static void speed_add_gaps(bool *is_gap)
{
    struct buf text = {0};
    struct err err;
    assert_true(file_read("tests/data/tokenizer/gaps.tsv", LINES_MAX, &text, &err));
    char *at = text.data, *line;
    while ((line = speed_line(&at))) {
        char *high = strchr(line, '\t');
        if (*line != '#' && high)
            is_gap[strtoul(high, NULL, 10)] = true;
    }
    buf_free(&text);
}

static void speed_spell(char *out, unsigned cp)
{
    out[0] = (char)(cp < 0x80 ? cp : 0xc0 | cp >> 6);
    out[1] = (char)(cp < 0x80 ? 0 : 0x80 | (cp & 0x3f));
    out[2] = 0;
}

static void speed_add_bytes(json_t *table)
{
    char text[3];
    json_int_t id = 0;
    unsigned spare = 0x100;
    for (int pass = 0; pass < 2; pass++) {
        for (unsigned b = 0; b < 256; b++) {
            bool plain = (b > 32 && b < 127) || (b > 160 && b < 173) || b > 173;
            if (plain == (pass == 1))
                continue;
            speed_spell(text, plain ? b : spare++);
            json_object_set_new(table, text, json_integer(id++));
        }
    }
}

static void speed_add_merges(json_t *table, json_t *merges)
{
    bool *is_gap = mem_new(1 << 20, 1);
    struct buf text = {0};
    struct err err;
    json_int_t id = 256;
    speed_add_gaps(is_gap);
    assert_true(file_read("tests/data/tokenizer/merges.txt", LINES_MAX, &text, &err));
    char *at = text.data, *line, name[32];
    while ((line = speed_line(&at))) {
        json_array_append_new(merges, json_string(line));
        for (; is_gap[id]; id++) {
            snprintf(name, sizeof name, "gap_%d", (int)id);
            json_object_set_new(table, name, json_integer(id));
        }
        char *space = strchr(line, ' ');
        memmove(space, space + 1, strlen(space));
        json_object_set_new(table, line, json_integer(id++));
    }
    assert_int_equal(id, 248044);
    buf_free(&text);
    free(is_gap);
}

static json_t *speed_added(void)
{
    struct buf text = {0};
    struct err err;
    json_t *list = json_array();
    assert_true(file_read("tests/data/tokenizer/added_tokens.tsv", LINES_MAX, &text, &err));
    char *at = text.data, *line;
    while ((line = speed_line(&at))) {
        char *name = strchr(line, '\t'), *special = name ? strchr(name + 1, '\t') : NULL;
        if (*line == '#' || !special)
            continue;
        json_array_append_new(list, json_pack("{s:i, s:s#, s:b}", "id", (int)strtol(line, NULL, 10),
                                              "content", name + 1, (int)(special - name - 1),
                                              "special", special[1] == '1'));
    }
    buf_free(&text);
    return list;
}

static int speed_open(void **state)
{
    (void)state;
    char folder[] = "/tmp/calla-test-XXXXXX";
    assert_non_null(mkdtemp(folder));
    json_t *file = speed_read_json("models/demo/tokenizer.json"),
           *model = json_object_get(file, "model"), *table = json_object(), *merges = json_array();
    speed_add_bytes(table);
    speed_add_merges(table, merges);
    json_object_set_new(model, "vocab", table);
    json_object_set_new(model, "merges", merges);
    json_object_set_new(file, "added_tokens", speed_added());
    speed_write_json(folder, "tokenizer.json", file);
    json_decref(file);
    struct err err = {0};
    if (!tokenizer_open(folder, &tokenizer, &err))
        fail_msg("%s", err.text);
    speed_remove(folder, "tokenizer.json");
    rmdir(folder);
    double start = spent_ms();
    vocab = grammar_vocab_open(tokenizer);
    print_message("the trie of %u tokens: %.0f ms\n", tokenizer_vocab(tokenizer),
                  spent_ms() - start);
    logits = mem_new(tokenizer_vocab(tokenizer), sizeof *logits);
    return 0;
}

static int speed_close(void **state)
{
    (void)state;
    free(logits);
    grammar_vocab_close(vocab);
    tokenizer_close(tokenizer);
    return 0;
}

/* ---- masks --------------------------------------------------------------------------------- */

static int speed_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Walks the text; the times of its masks in milliseconds, sorted. */
static size_t speed_walk(const struct grammar *grammar, const char *text, double *ms, size_t max)
{
    struct token_list ids = {0};
    struct err err;
    int32_t stop = tokenizer_find(tokenizer, "<|im_end|>");
    size_t n = tokenizer_vocab(tokenizer);
    assert_true(tokenizer_encode(tokenizer, text, strlen(text), NULL, 0, &ids, &err));
    struct grammar_run *run = grammar_run_open(grammar, vocab);
    size_t count = ids.len + 1;
    assert_true(count <= max);
    for (size_t i = 0; i < count; i++) {
        memset(logits, 0, n * sizeof *logits);
        double start = spent_ms();
        grammar_run_mask(run, &stop, 1, logits, n);
        ms[i] = spent_ms() - start;
        if (i < ids.len && !grammar_run_accept(run, ids.ids[i]))
            fail_msg("%s: token %zu is refused", text, i);
    }
    grammar_run_close(run);
    token_list_free(&ids);
    qsort(ms, count, sizeof *ms, speed_compare);
    return count;
}

static void speed_report(const char *name, const struct grammar *grammar, const char *text)
{
    enum { MAX = 4096 };
    double *ms = mem_new(MAX, sizeof *ms), sum = 0;
    size_t n = speed_walk(grammar, text, ms, MAX);
    for (size_t i = 0; i < n; i++)
        sum += ms[i];
    print_message("%-8s %4zu masks: median %.3f, mean %.3f, 90 %% %.3f, worst %.3f ms\n", name, n,
                  ms[n / 2], sum / (double)n, ms[n * 9 / 10], ms[n - 1]);
    assert_true(ms[n / 2] < 1.0 * SLOWER);
    free(ms);
}

static const char schema_text[] =
    "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"age\":{\"type\":"
    "\"integer\"},\"email\":{\"type\":\"string\",\"maxLength\":100},\"height\":{\"type\":"
    "\"number\"},"
    "\"active\":{\"type\":\"boolean\"},\"role\":{\"enum\":[\"admin\",\"user\",\"guest\"]},\"tags\":"
    "{\"type\":\"array\",\"items\":{\"type\":\"string\"}},\"address\":{\"anyOf\":[{\"type\":"
    "\"null\"},{\"type\":\"object\",\"properties\":{\"street\":{\"type\":\"string\"},\"city\":{"
    "\"type\":\"string\"}},\"required\":[\"street\",\"city\"]}]}},\"required\":[\"name\",\"age\","
    "\"tags\"]}";

static const char answer_text[] =
    "{\"name\": \"Johann Sebastian Bach\", \"age\": 65, \"email\": \"bach@thomaskirche.example\", "
    "\"height\": 1.74, \"active\": false, \"role\": \"admin\", \"tags\": [\"organ\", \"a longer "
    "tag with \\\"quotes\\\" and \\u00fc\", \"\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e\"], "
    "\"address\": {\"street\": \"Thomaskirchhof 18\", \"city\": \"Leipzig\"}}";

static void speed_schema(void **state)
{
    (void)state;
    struct err err = {0};
    struct grammar *grammar, *any;
    json_t *schema = json_loads(schema_text, 0, NULL), *yes = json_true();
    assert_true(grammar_from_schema(schema, &grammar, &err));
    assert_true(grammar_from_schema(yes, &any, &err));
    speed_report("schema", grammar, answer_text);
    speed_report("any JSON", any, answer_text);
    grammar_free(grammar);
    grammar_free(any);
    json_decref(schema);
}

static const char tools_text[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"write\",\"parameters\":{\"type\":\"object\","
    "\"properties\":{\"path\":{\"type\":\"string\"},\"content\":{\"type\":\"string\"},\"mode\":{"
    "\"type\":\"integer\"},\"options\":{\"type\":\"object\"}},\"required\":[\"path\",\"content\"]"
    "}}},{\"type\":\"function\",\"function\":{\"name\":\"read\",\"parameters\":{\"type\":\"object\""
    ",\"properties\":{\"path\":{\"type\":\"string\"}},\"required\":[\"path\"]}}}]";

static const char call_text[] =
    "<tool_call>\n<function=write>\n<parameter=path>\nsrc/main.c\n</parameter>\n"
    "<parameter=content>\n#include <stdio.h>\n\nint main(void)\n{\n    for (int i = 0; i < 10; "
    "i++) {\n        if (i > 3 && i < 7)\n            printf(\"%d </b> <p>\\n\", i);\n    }\n"
    "    return 0;\n}\n\n</parameter>\n<parameter=mode>\n420\n</parameter>\n<parameter=options>\n"
    "{\"a\": [1, 2, {\"b\": \"c\"}]}\n</parameter>\n</function>\n</tool_call>";

static void speed_tools(void **state)
{
    (void)state;
    struct err err = {0};
    struct grammar *grammar;
    json_t *tools = json_loads(tools_text, 0, NULL);
    assert_true(grammar_from_tools(tools, NULL, true, &grammar, &err));
    speed_report("tools", grammar, call_text);
    grammar_free(grammar);
    json_decref(tools);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(speed_schema),
        cmocka_unit_test(speed_tools),
    };
    return cmocka_run_group_tests(tests, speed_open, speed_close);
}
