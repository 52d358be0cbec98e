#include "cmd/store.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool store_is_name(const char *name)
{
    const char *slash = strchr(name, '/');
    if (!slash || slash == name || !slash[1] || *name == '.' || slash[1] == '.' ||
        strlen(name) > 200)
        return false;
    for (const char *p = name; *p; p++)
        if (p != slash && !isalnum((unsigned char)*p) && !strchr("._-", *p))
            return false;
    return true;
}

/* $variable/tail when the variable is an absolute path, else $HOME/home_tail/tail, else null. */
static char *store_place(const char *variable, const char *home_tail, const char *tail)
{
    const char *base = getenv(variable), *home = getenv("HOME");
    if (base && *base == '/')
        return file_join(base, tail);
    if (!home || *home != '/')
        return NULL;
    char *folder = file_join(home, home_tail), *out = file_join(folder, tail);
    free(folder);
    return out;
}

static char *store_models(void)
{
    return store_place("XDG_DATA_HOME", ".local/share", "calla/models");
}

char *store_cache_folder(const char *tail)
{
#ifdef __APPLE__
    return store_place("XDG_CACHE_HOME", "Library/Caches", tail);
#else
    return store_place("XDG_CACHE_HOME", ".cache", tail);
#endif
}

char *store_folder(const char *name)
{
    char *models = store_models();
    if (!models)
        return NULL;
    char *out = file_join(models, name);
    free(models);
    return out;
}

static bool store_is_folder(const char *path)
{
    struct stat st;
    return !stat(path, &st) && S_ISDIR(st.st_mode);
}

bool store_make_folder(const char *path, struct err *err)
{
    char *copy = mem_copy_text(path, strlen(path));
    bool ok = true;
    for (char *p = copy + 1; ok; p++) {
        if (*p && *p != '/')
            continue;
        char end = *p;
        *p = 0;
        if (mkdir(copy, 0777) && errno != EEXIST)
            ok = err_set_errno(err, "cannot make the folder %s", copy);
        *p = end;
        if (!end)
            break;
    }
    if (ok && !store_is_folder(path))
        ok = err_set(err, ERR_INPUT, "%s is in the way: a folder must be there", path);
    free(copy);
    return ok;
}

/* Folder joined with name when config.json is in there, else null. */
static char *store_model_in(const char *folder, const char *name)
{
    char *path = file_join(folder, name), *config = file_join(path, "config.json");
    bool found = file_exists(config);
    free(config);
    if (found)
        return path;
    free(path);
    return NULL;
}

/* A snapshot that the branch main names, or else any that has a config.json. */
static char *store_find_snapshot(const char *repository)
{
    char *snapshots = file_join(repository, "snapshots"), *ref = file_join(repository, "refs/main");
    char *found = NULL;
    struct buf revision = {0};
    if (file_read(ref, 100, &revision, NULL) && revision.len) {
        revision.data[strcspn(revision.data, "\r\n/")] = 0;
        found = store_model_in(snapshots, revision.data);
    }
    DIR *dir = found ? NULL : opendir(snapshots);
    for (struct dirent *e; dir && !found && (e = readdir(dir));)
        if (e->d_name[0] != '.')
            found = store_model_in(snapshots, e->d_name);
    if (dir)
        closedir(dir);
    buf_free(&revision);
    free(snapshots);
    free(ref);
    return found;
}

/* HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub, in the layout models--OWNER--NAME. */
static char *store_find_cached(const char *name)
{
    const char *cache = getenv("HF_HUB_CACHE");
    char *hub = cache && *cache == '/' ? mem_copy_text(cache, strlen(cache))
                                       : store_place("HF_HOME", ".cache/huggingface", "hub");
    if (!hub)
        return NULL;
    const char *slash = strchr(name, '/');
    struct buf folder = {0};
    buf_printf(&folder, "%s/models--%.*s--%s", hub, (int)(slash - name), name, slash + 1);
    char *found = store_find_snapshot(folder.data);
    buf_free(&folder);
    free(hub);
    return found;
}

/* NAME alone, when one owner's pulled model has it: the owner may be left out. */
static char *store_find_unowned(const char *name)
{
    char *models = store_models(), *found = NULL;
    DIR *dir = models ? opendir(models) : NULL;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (e->d_name[0] == '.')
            continue;
        char *owner = file_join(models, e->d_name), *path = store_model_in(owner, name);
        free(owner);
        if (path && found) {
            free(path);
            free(found);
            found = NULL;
            break;
        }
        found = path ? path : found;
    }
    if (dir)
        closedir(dir);
    free(models);
    return found;
}

static bool store_fail(const char *name, const char *folder, struct err *err)
{
    struct buf partial = {0};
    buf_printf(&partial, "%s.partial", folder ? folder : "");
    bool begun = folder && store_is_folder(partial.data);
    buf_free(&partial);
    if (begun)
        return err_set(err, ERR_INPUT, "%s is not fetched whole yet; go on with: calla pull %s",
                       name, name);
    if (access(name, F_OK) == 0)
        return err_set(err, ERR_INPUT,
                       "%s is not a folder; a model is a folder with config.json, tokenizer.json "
                       "and *.safetensors (MLX or Hugging Face; GGUF files are not read)",
                       name);
    if (store_is_name(name))
        return err_set(err, ERR_INPUT,
                       "there is neither a folder nor a pulled model '%s'; fetch it with: "
                       "calla pull %s",
                       name, name);
    return err_set(err, ERR_INPUT,
                   "there is neither a folder nor a pulled model '%s'; name a folder, or "
                   "OWNER/NAME as in calla pull OWNER/NAME",
                   name);
}

bool store_find(const char *name, char **out, struct err *err)
{
    *out = NULL;
    if (store_is_folder(name)) {
        *out = mem_copy_text(name, strlen(name));
        return true;
    }
    char *folder = NULL;
    if (store_is_name(name)) {
        char *models = store_models();
        folder = store_folder(name);
        *out = models ? store_model_in(models, name) : NULL;
        if (!*out)
            *out = store_find_cached(name);
        free(models);
    } else if (*name && !strchr(name, '/') && *name != '.') {
        *out = store_find_unowned(name);
    }
    bool ok = *out || store_fail(name, folder, err);
    free(folder);
    return ok;
}
