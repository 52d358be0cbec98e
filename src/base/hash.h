/* A 64-bit hash of bytes, to find damage and to tell equal from different; not for secrets. Four
 * lanes of multiply and rotate, so that it keeps up with memory. The same on every machine of
 * little-endian byte order, which is all that this program runs on. */
#ifndef BASE_HASH_H
#define BASE_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t hash_step(uint64_t h, uint64_t word)
{
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h << 29 | h >> 35;
}

/* Spreads every bit over all (the end of SplitMix64). */
static inline uint64_t hash_end(uint64_t h)
{
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
    h = (h ^ h >> 27) * 0x94d049bb133111ebu;
    return h ^ h >> 31;
}

static inline uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    uint64_t lane[4] = {seed, seed + 1, seed + 2, seed + 3}, word[4];
    size_t left = n;
    for (; left >= sizeof word; left -= sizeof word, p += sizeof word) {
        memcpy(word, p, sizeof word);
        for (int i = 0; i < 4; i++)
            lane[i] = hash_step(lane[i], word[i]);
    }
    memset(word, 0, sizeof word);
    memcpy(word, p, left);
    uint64_t h = hash_step(n, word[0]);
    for (int i = 0; i < 4; i++)
        h = hash_step(hash_step(h, word[i]), lane[i]);
    return hash_end(h);
}

#endif
