/* The chat page, as the build embeds it from web/index.html. */
#ifndef SERVER_PAGE_H
#define SERVER_PAGE_H

#include <stddef.h>

extern const unsigned char page_html[];
extern const size_t page_html_len;

#endif
