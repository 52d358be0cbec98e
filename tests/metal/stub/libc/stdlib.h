// What the backend's host file takes from libc, for compiling it for a Mac without an SDK.
#pragma once
#include <stddef.h>
void *calloc(size_t count, size_t size);
void free(void *p);
