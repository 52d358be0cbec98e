/* Where models are on this machine.
 *
 * Pulled models are at $XDG_DATA_HOME/calla/models/OWNER/NAME (without the variable:
 * ~/.local/share). A folder of that name holds a whole, checked model; one that is still being
 * fetched is beside it as NAME.partial. Models in the Hugging Face cache folder are read there
 * and never changed. */
#ifndef CMD_STORE_H
#define CMD_STORE_H

#include "base/err.h"

/* True for OWNER/NAME of letters, digits, '.', '_' and '-', neither part starting with a dot. */
bool store_is_name(const char *name);

/* Folder of a pulled model, there or not; null when neither XDG_DATA_HOME nor HOME is set. The
 * caller frees it. */
char *store_folder(const char *name);

/* A place in the user's cache folder: $XDG_CACHE_HOME/tail, ~/.cache/tail, on macOS
 * ~/Library/Caches/tail; null without these variables. The caller frees it. */
char *store_cache_folder(const char *tail);

/* Makes a folder and those above it. */
bool store_make_folder(const char *path, struct err *err);

/* The folder that -m NAME means, in this order: a folder of that path, a pulled model, a model in
 * the Hugging Face cache. Fails with what to type. The caller frees *out. */
bool store_find(const char *name, char **out, struct err *err);

#endif
