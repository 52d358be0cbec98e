/* base/digest: known values of FIPS 180-4 and of git hash-object. */
#include "base/digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void check_digest(const char *text, size_t repeat, enum digest_kind kind, const char *want)
{
    char path[] = "/tmp/calla-digest-XXXXXX", hex[DIGEST_HEX + 1];
    struct err err = {0};
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *file = fdopen(fd, "w");
    for (size_t i = 0; i < repeat; i++)
        fputs(text, file);
    assert_int_equal(fclose(file), 0);
    bool ok = digest_file(path, kind, NULL, NULL, hex, &err);
    unlink(path);
    assert_true(ok);
    assert_string_equal(hex, want);
}

static void test_sha256(void **state)
{
    (void)state;
    check_digest("", 1, DIGEST_SHA256,
                 "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_digest("abc", 1, DIGEST_SHA256,
                 "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    check_digest("aaaaaaaaaa", 100000, DIGEST_SHA256,
                 "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void test_git_blob(void **state)
{
    (void)state;
    check_digest("", 1, DIGEST_GIT_BLOB, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
    check_digest("test content\n", 1, DIGEST_GIT_BLOB, "d670460b4b4aece5915caf5c68d12f560a9fe3e4");
}

static void test_missing_file(void **state)
{
    (void)state;
    char hex[DIGEST_HEX + 1];
    struct err err = {0};
    assert_false(digest_file("/nonexistent/file", DIGEST_SHA256, NULL, NULL, hex, &err));
    assert_non_null(strstr(err.text, "/nonexistent/file"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sha256),
        cmocka_unit_test(test_git_blob),
        cmocka_unit_test(test_missing_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
