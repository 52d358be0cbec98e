/* Who may ask: keys, hosts and origins. */
#ifndef SERVER_GUARD_H
#define SERVER_GUARD_H

#include "server/core.h"

/* False, with the fault, for a request that is not to be served. */
bool guard_admit(const struct exchange *x, struct fault *fault);

#endif
