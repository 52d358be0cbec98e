/* Deterministic random numbers: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), the same on every
 * machine. Not for secrets. */
#ifndef BASE_RAND_H
#define BASE_RAND_H

#include <stdint.h>

struct rand {
    uint64_t state;
};

static inline uint64_t rand_u64(struct rand *r)
{
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Uniform in [0, 1), 53 bits. */
static inline double rand_unit(struct rand *r)
{
    return (double)(rand_u64(r) >> 11) * 0x1p-53;
}

/* Uniform in [0, n), n > 0. The bias is below n / 2^64. */
static inline uint64_t rand_below(struct rand *r, uint64_t n)
{
    return (uint64_t)((unsigned __int128)rand_u64(r) * n >> 64);
}

/* Approximately normal, mean 0, variance 1: the sum of 12 uniforms less 6. */
static inline float rand_normal(struct rand *r)
{
    double sum = -6.0;
    for (int i = 0; i < 12; i++)
        sum += rand_unit(r);
    return (float)sum;
}

#endif
