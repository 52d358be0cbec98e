/* The functions that checked kernel code calls: clang's thread-sanitizer instrumentation names
 * every memory access with its size, its undefined-behaviour instrumentation names what it found.
 * Kernels are linked without the sanitizers' own runtimes; these are here instead. The names are
 * the compiler's. */
#include "internal.h"

#include <string.h>

#define SITE __builtin_return_address(0)

/* ---- plain accesses ----------------------------------------------------------------------- */

#define HOOK(name, bytes, is_write)                                                                \
    void name(void *address);                                                                      \
    void name(void *address)                                                                       \
    {                                                                                              \
        memory_access(address, bytes, is_write, false, SITE);                                      \
    }

#define HOOKS(bytes)                                                                               \
    HOOK(__tsan_read##bytes, bytes, false)                                                         \
    HOOK(__tsan_write##bytes, bytes, true)                                                         \
    HOOK(__tsan_unaligned_read##bytes, bytes, false)                                               \
    HOOK(__tsan_unaligned_write##bytes, bytes, true)                                               \
    HOOK(__tsan_volatile_read##bytes, bytes, false)                                                \
    HOOK(__tsan_volatile_write##bytes, bytes, true)                                                \
    HOOK(__tsan_unaligned_volatile_read##bytes, bytes, false)                                      \
    HOOK(__tsan_unaligned_volatile_write##bytes, bytes, true)

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_init(void);
void __tsan_init(void)
{
}

void *__tsan_memcpy(void *to, const void *from, size_t bytes);
void *__tsan_memcpy(void *to, const void *from, size_t bytes)
{
    if (bytes) {
        memory_access(from, bytes, false, false, SITE);
        memory_access(to, bytes, true, false, SITE);
    }
    return memcpy(to, from, bytes);
}

void *__tsan_memmove(void *to, const void *from, size_t bytes);
void *__tsan_memmove(void *to, const void *from, size_t bytes)
{
    if (bytes) {
        memory_access(from, bytes, false, false, SITE);
        memory_access(to, bytes, true, false, SITE);
    }
    return memmove(to, from, bytes);
}

void *__tsan_memset(void *to, int value, size_t bytes);
void *__tsan_memset(void *to, int value, size_t bytes)
{
    if (bytes)
        memory_access(to, bytes, true, false, SITE);
    return memset(to, value, bytes);
}

/* ---- atomics: fibers switch only where they wait, so plain code is atomic ------------------ */

#define ATOMIC_UPDATE(bits, type, name, expression)                                                \
    type __tsan_atomic##bits##_##name(volatile type *a, type v, int order);                        \
    type __tsan_atomic##bits##_##name(volatile type *a, type v, int order)                         \
    {                                                                                              \
        (void)order;                                                                               \
        memory_note_update((const void *)a);                                                       \
        memory_access((const void *)a, sizeof *a, true, true, SITE);                               \
        type old = *a;                                                                             \
        *a = (type)(expression);                                                                   \
        return old;                                                                                \
    }

#define ATOMIC_COMPARE(bits, type, name)                                                           \
    int __tsan_atomic##bits##_compare_exchange_##name(volatile type *a, type *expected, type v,    \
                                                      int order, int failure_order);               \
    int __tsan_atomic##bits##_compare_exchange_##name(volatile type *a, type *expected, type v,    \
                                                      int order, int failure_order)                \
    {                                                                                              \
        (void)order;                                                                               \
        (void)failure_order;                                                                       \
        memory_note_update((const void *)a);                                                       \
        memory_access((const void *)a, sizeof *a, true, true, SITE);                               \
        type old = *a;                                                                             \
        if (old == *expected) {                                                                    \
            *a = v;                                                                                \
            return 1;                                                                              \
        }                                                                                          \
        *expected = old;                                                                           \
        return 0;                                                                                  \
    }

#define ATOMICS(bits, type)                                                                        \
    type __tsan_atomic##bits##_load(const volatile type *a, int order);                            \
    type __tsan_atomic##bits##_load(const volatile type *a, int order)                             \
    {                                                                                              \
        (void)order;                                                                               \
        memory_access((const void *)a, sizeof *a, false, true, SITE);                              \
        return *a;                                                                                 \
    }                                                                                              \
    void __tsan_atomic##bits##_store(volatile type *a, type v, int order);                         \
    void __tsan_atomic##bits##_store(volatile type *a, type v, int order)                          \
    {                                                                                              \
        (void)order;                                                                               \
        memory_access((const void *)a, sizeof *a, true, true, SITE);                               \
        *a = v;                                                                                    \
    }                                                                                              \
    type __tsan_atomic##bits##_compare_exchange_val(volatile type *a, type expected, type v,       \
                                                    int order, int failure_order);                 \
    type __tsan_atomic##bits##_compare_exchange_val(volatile type *a, type expected, type v,       \
                                                    int order, int failure_order)                  \
    {                                                                                              \
        (void)order;                                                                               \
        (void)failure_order;                                                                       \
        memory_note_update((const void *)a);                                                       \
        memory_access((const void *)a, sizeof *a, true, true, SITE);                               \
        type old = *a;                                                                             \
        if (old == expected)                                                                       \
            *a = v;                                                                                \
        return old;                                                                                \
    }                                                                                              \
    ATOMIC_COMPARE(bits, type, weak)                                                               \
    ATOMIC_COMPARE(bits, type, strong)                                                             \
    ATOMIC_UPDATE(bits, type, exchange, v)                                                         \
    ATOMIC_UPDATE(bits, type, fetch_add, old + v)                                                  \
    ATOMIC_UPDATE(bits, type, fetch_sub, old - v)                                                  \
    ATOMIC_UPDATE(bits, type, fetch_and, old &v)                                                   \
    ATOMIC_UPDATE(bits, type, fetch_or, old | v)                                                   \
    ATOMIC_UPDATE(bits, type, fetch_xor, old ^ v)

ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order)
{
    (void)order;
}

/* ---- undefined behaviour: each handler's data begins with the place in the source ---------- */

#define UNDEFINED(name, what)                                                                      \
    void __ubsan_handle_##name(void *data);                                                        \
    void __ubsan_handle_##name(void *data)                                                         \
    {                                                                                              \
        (void)data;                                                                                \
        report_add("undefined", SITE, "%s", what);                                                 \
    }

UNDEFINED(out_of_bounds, "index outside an array")
UNDEFINED(shift_out_of_bounds, "shift by as many bits as the type has, or of a negative number")
UNDEFINED(divrem_overflow, "integer division by zero")
UNDEFINED(type_mismatch_v1, "misaligned address")
UNDEFINED(load_invalid_value, "value that its type cannot hold")
UNDEFINED(builtin_unreachable, "reached what cannot be reached")
UNDEFINED(missing_return, "end of a function without its return value")
UNDEFINED(float_cast_overflow, "floating-point value outside the integer type")
UNDEFINED(pointer_overflow, "pointer arithmetic that wraps")
UNDEFINED(add_overflow, "signed addition that overflows")
UNDEFINED(sub_overflow, "signed subtraction that overflows")
UNDEFINED(mul_overflow, "signed multiplication that overflows")
UNDEFINED(negate_overflow, "negation that overflows")

void emu_index_outside(void)
{
    report_add("undefined", SITE, "index outside a vector or array");
}

/* ---- compiler support --------------------------------------------------------------------- */

/* f32 to bf16, nearest even; clang calls these for __bf16 on CPUs without the instruction. */
__bf16 __truncsfbf2(float x);
__bf16 __truncsfbf2(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t rounded;
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        rounded = (uint16_t)(bits >> 16 | 0x40); /* keep a NaN a NaN */
    else
        rounded = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    __bf16 result;
    memcpy(&result, &rounded, sizeof result);
    return result;
}

__bf16 __truncdfbf2(double x);
__bf16 __truncdfbf2(double x)
{
    return __truncsfbf2((float)x);
}
