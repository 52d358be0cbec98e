/* Every way a safetensors file can be wrong has its own line. */
#include "base/rand.h"
#include "model/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "folder.h"

static char file_path[] = "/tmp/calla-st-XXXXXX";

static int make_file(void **state)
{
    (void)state;
    int fd = mkstemp(file_path);
    close(fd);
    return fd < 0;
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(file_path);
}

/* `length` < 0: the header's own. */
static void write_file(const char *header, long long length, size_t data_bytes)
{
    uint64_t n = length < 0 ? strlen(header) : (uint64_t)length;
    FILE *f = fopen(file_path, "wb");
    assert_non_null(f);
    for (int i = 0; i < 8; i++)
        fputc((int)(n >> 8 * i & 255), f);
    fputs(header, f);
    for (size_t i = 0; i < data_bytes; i++)
        fputc(0, f);
    fclose(f);
}

static void expect_error(const char *text)
{
    struct safetensors file;
    struct err err = {0};
    assert_false(safetensors_open(file_path, &file, &err));
    assert_int_equal(err.kind, ERR_INPUT);
    if (!strstr(err.text, text) || !strstr(err.text, file_path))
        fail_msg("wanted '%s', have '%s'", text, err.text);
}

static void test_good(void **state)
{
    (void)state;
    struct safetensors file;
    struct err err;
    char shape[32];
    /* Out of order, a gap, an empty tensor, metadata, a scalar. */
    write_file("{\"__metadata__\":{\"a\":\"b\"},"
               "\"y\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[8,24]},"
               "\"x\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]},"
               "\"e\":{\"dtype\":\"U8\",\"shape\":[0,7],\"data_offsets\":[6,6]},"
               "\"s\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[24,32]}}  ",
               -1, 32);
    if (!safetensors_open(file_path, &file, &err))
        fail_msg("%s", err.text);
    assert_int_equal(file.count, 4);
    assert_string_equal(file.tensors[0].name, "x");
    assert_int_equal(file.tensors[0].dtype, SAFETENSORS_BF16);
    assert_string_equal(file.tensors[2].name, "y");
    assert_int_equal(file.tensors[2].bytes, 16);
    assert_ptr_equal(file.tensors[2].data, file.map.data + file.map.bytes - 24);
    safetensors_print_shape(&file.tensors[2], shape, sizeof shape);
    assert_string_equal(shape, "[2, 2]");
    assert_int_equal(file.tensors[3].rank, 0);
    safetensors_close(&file);
}

/* Pitfall 94 among them. */
static void test_bad_files(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        long long length;
        size_t data;
        const char *error;
    } cases[] = {
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", -1, 15,
         "truncated: have 78, need 79 bytes; download it again"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", -1, 17,
         "1 bytes follow the last tensor"},
        {"{}", 3, 0, "truncated: have 10, need 11 bytes for the header alone; download it again"},
        {"{}", 100000001, 0, "header claims 100000001 bytes"},
        {"{}", -2, 0, NULL}, /* replaced below: shorter than 8 bytes */
        {"{\"a\":1}", -1, 0, "tensor a: its entry is not an object"},
        {"[1]", -1, 0, "header is damaged: not a JSON object"},
        {"{\"a\":", -1, 0, "header is damaged"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
         -1, 2, "duplicate"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[4],\"data_offsets\":[0,16]}}", -1, 16,
         "tensor a: unknown dtype \"F31\""},
        {"{\"a\":{\"shape\":[4],\"data_offsets\":[0,16]}}", -1, 16, "unknown dtype \"\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,16]}}", -1, 16,
         "shape [3] of F32 takes 12 bytes, its offsets hold 16"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", -1,
         0, "shape overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]}}", -1, 16,
         "something other than sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,6]}}", -1, 6,
         "something other than sizes"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", -1, 1,
         "at most 8 sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,0]}}", -1, 16,
         "begin <= end"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0]}}", -1, 16, "begin <= end"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[-16,0]}}", -1, 16,
         "begin <= end"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[9223372036854775803,"
         "9223372036854775807]}}",
         -1, 4, "truncated"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
         -1, 7, "tensors a and b overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
         -1, 4, "overlap"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (!cases[i].error) {
            FILE *f = fopen(file_path, "wb");
            fputs("abc", f);
            fclose(f);
            expect_error("truncated: have 3, need at least 8 bytes");
            continue;
        }
        write_file(cases[i].header, cases[i].length, cases[i].data);
        expect_error(cases[i].error);
    }
    FILE *f = fopen(file_path, "wb");
    fputs("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", f);
    fclose(f);
    expect_error("Git LFS pointer");
    f = fopen(file_path, "wb");
    fclose(f);
    expect_error("truncated: have 0");
}

static void test_not_a_file(void **state)
{
    (void)state;
    struct safetensors file;
    struct err err;
    assert_false(safetensors_open("/tmp", &file, &err));
    assert_non_null(strstr(err.text, "not a regular file"));
    assert_false(safetensors_open("/nowhere/x", &file, &err));
    assert_non_null(strstr(err.text, "cannot open"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_not_a_file),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
