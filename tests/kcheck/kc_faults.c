#include "kcheck.h"
const struct kc_fault kc_faults[] = {{0}};
const int kc_fault_count = 0;
