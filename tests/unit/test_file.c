/* Whatever stands in the place of a model's file, opening the model ends at once and names it. */
#include "serving.h"

#include "base/file.h"
#include "engine/disk.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static const char *const names[] = {"config.json",       "generation_config.json",
                                    "model.safetensors", "model.safetensors.index.json",
                                    "tokenizer.json",    "tokenizer_config.json"};

enum { NAMES = sizeof names / sizeof *names };

enum kind { PIPE, FOLDER, SOCKET, DEVICE, ZEROS, TERMINAL, DANGLING, LOOP, UNDER_A_FILE, KINDS };

static void make_kind(const char *path, enum kind kind)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd;
    switch (kind) {
    case PIPE:
        assert_int_equal(mkfifo(path, 0600), 0);
        break;
    case FOLDER:
        assert_int_equal(mkdir(path, 0700), 0);
        break;
    case SOCKET:
        snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
        fd = socket(AF_UNIX, SOCK_STREAM, 0);
        assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
        close(fd);
        break;
    default: {
        static const char *const targets[] = {
            [DEVICE] = "/dev/null",         [ZEROS] = "/dev/zero", [TERMINAL] = "/dev/tty",
            [DANGLING] = "/nowhere/at-all", [LOOP] = "loop",       [UNDER_A_FILE] = "/etc/passwd/x",
        };
        assert_int_equal(symlink(kind == LOOP ? path : targets[kind], path), 0);
    }
    }
}

/* Links to the demo model's files, but one of them is of the kind. */
static void make_folder(char *folder, const char *wrong, enum kind kind)
{
    char real[400];
    snprintf(folder, 32, "/tmp/calla-file-XXXXXX");
    assert_non_null(mkdtemp(folder));
    assert_non_null(getcwd(real, sizeof real - 100));
    for (int i = 0; i < NAMES; i++) {
        char *path = file_join(folder, names[i]), target[512];
        snprintf(target, sizeof target, "%s/models/demo/%s", real, names[i]);
        if (!strcmp(names[i], wrong))
            make_kind(path, kind);
        else
            assert_int_equal(symlink(target, path), 0);
        free(path);
    }
}

static void nothing_else_is_taken_for_a_file(void **unused)
{
    (void)unused;
    for (int i = 0; i < NAMES; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            char folder[32];
            struct engine *engine;
            struct err err = {0};
            uint64_t hash, start_ns = clock_now_ns();
            make_folder(folder, names[i], (enum kind)kind);
            struct engine_options options = {.model = folder, .threads = 1, .ctx = 256};
            if (engine_open(&options, &engine, &err))
                fail_msg("%s of kind %d was taken", names[i], kind);
            if (!strstr(err.text, names[i]) || err.kind != ERR_INPUT)
                fail_msg("%s of kind %d: %s", names[i], kind, err.text);
            /* the cache asks for the same files */
            bool hashed = i == 0 || i == 2;
            assert_int_equal(disk_hash_model(folder, &hash, &err), !hashed);
            assert_true(clock_seconds_since(start_ns) < 5);
            char *path = file_join(folder, names[i]);
            rmdir(path);
            free(path);
            folder_remove(folder);
        }
}

/* Absence is allowed where the file may be absent, and the links alone do no harm. */
static void links_are_followed(void **unused)
{
    (void)unused;
    static const char *const optional[] = {"none", "generation_config.json", "tokenizer.json",
                                           "tokenizer_config.json"};
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) {
        char folder[32];
        make_folder(folder, "none", PIPE);
        char *path = file_join(folder, optional[i]);
        unlink(path);
        struct engine *engine = serve_open(folder, NULL, 256, 64, 1);
        assert_int_equal(engine_tokenizer(engine) != NULL, i != 2);
        engine_close(engine);
        free(path);
        folder_remove(folder);
    }
}

/* What a user names as text may be a pipe. */
static void texts_may_be_pipes(void **unused)
{
    (void)unused;
    struct buf out = {0};
    struct err err = {0};
    int ends[2];
    char path[32];
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], "hello", 5), 5);
    close(ends[1]);
    snprintf(path, sizeof path, "/dev/fd/%d", ends[0]);
    assert_true(file_read(path, 100, &out, &err));
    assert_string_equal(out.data, "hello");
    assert_false(file_read_regular(path, 100, &out, &err));
    assert_non_null(strstr(err.text, "not a regular file"));
    assert_false(file_read("/dev/zero", 1000, &out, &err));
    assert_non_null(strstr(err.text, "larger than"));
    assert_false(file_read("/tmp", 1000, &out, &err));
    close(ends[0]);
    buf_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_else_is_taken_for_a_file),
        cmocka_unit_test(links_are_followed),
        cmocka_unit_test(texts_may_be_pipes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
