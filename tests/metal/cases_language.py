"""Text that Metal refuses, or that leaves the subset, and text that must pass: tests of the lint.

Each refused case names a part of the message, so that it is refused for the right reason."""
import emulator as emu

_HEAD = '#include <metal_stdlib>\nusing namespace metal;\n'
# Where a case is only the body of a kernel.
_KERNEL = (_HEAD + '{before}\n'
           'kernel void k(device float *x [[buffer(0)]], device const float *in [[buffer(1)]],\n'
           '              constant uint &n [[buffer(2)]], constant float *table [[buffer(3)]],\n'
           '              device bfloat *b [[buffer(4)]], device half *h [[buffer(5)]],\n'
           '              uint i [[thread_position_in_grid]])\n'
           '{{\n    threadgroup float shared[32];\n    {body}\n}}\n')

# (name, before the kernel, body, part of the message)
ADDRESS_SPACES = [
    ('device-to-threadgroup', '', 'threadgroup float *p = x; p[0] = 1.0f;', 'cannot initialize'),
    ('threadgroup-to-device', '', 'device float *p = shared; p[0] = 1.0f;', 'cannot initialize'),
    ('constant-to-device', '', 'device const float *p = table; x[0] = p[0];', 'cannot initialize'),
    ('device-to-thread', '', 'thread float *p = x; p[0] = 1.0f;', 'cannot initialize'),
    ('thread-to-device', '', 'float v = 0.0f; device float *p = &v; p[0] = 1.0f;',
     'cannot initialize'),
    ('argument-device-for-threadgroup', 'float f(threadgroup float *p) { return p[0]; }',
     'x[0] = f(x);', 'no matching function'),
    ('argument-threadgroup-for-device', 'float f(device const float *p) { return p[0]; }',
     'x[0] = f(shared);', 'no matching function'),
    ('argument-thread-for-constant', 'float f(constant float *p) { return p[0]; }',
     'float v[2] = {1.0f, 2.0f}; x[0] = f(v);', 'no matching function'),
    ('reference-device-for-thread', 'void f(thread float &v) { v = 1.0f; }', 'f(x[0]);',
     'no matching function'),
    ('reference-threadgroup-for-device', 'void f(device float &v) { v = 1.0f; }',
     'f(shared[0]);', 'no matching function'),
    ('pointer-to-pointer', 'void f(device float *thread &p) { p += 1; }',
     'threadgroup float *p = shared; f(p);', 'no matching function'),
    ('write-to-constant', '', 'table[0] = 1.0f;', 'read-only'),
    ('write-through-const', '', '((device const float *)x)[0] = 1.0f;', 'read-only'),
    ('conditional-of-two-spaces', '', 'x[0] = (n > 1u ? x : shared)[i];', 'incompatible operand types'),
    ('pointer-without-space', '', 'float *p = nullptr; (void)p;', 'rule 2'),
    ('reference-without-space', 'float f(const float &v) { return v; }', 'x[0] = f(1.0f);',
     'rule 2'),
    ('cast-without-space', '', 'x[0] = *(float *)(x + 1);', 'rule 2'),
    ('struct-pointer-without-space', 'struct s { float v; };\nfloat f(s *p) { return p->v; }', '',
     'rule 2'),
    ('overload-by-space', 'float f(device const float *p) { return p[0]; }\n'
     'float f(threadgroup const float *q) { return q[0]; }', 'x[0] = f(x) + f(shared);',
     'overloaded by address space'),
    ('struct-copied-from-constant', 'struct s { uint a; };', 's v = *(constant s *)table; '
     'x[0] = float(v.a);', 'no viable conversion'),
    ('atomic-on-constant', '', 'atomic_load_explicit((constant atomic_uint *)table, '
     'memory_order_relaxed);', 'no matching function'),
    ('program-scope-constant-as-device', 'constant float t[2] = {1.0f, 2.0f};',
     'device const float *p = t; x[0] = p[0];', 'cannot initialize'),
]

REFUSED = [
    ('double', '', 'double v = 1.0f; x[0] = float(v);', 'double'),
    ('long-long', '', 'long long v = 1; x[0] = float(v);', 'long long'),
    ('goto', '', 'goto end; end: x[0] = 1.0f;', 'goto'),
    ('virtual', 'struct s { virtual float f(); };', '', 'virtual'),
    ('exception', '', 'try { x[0] = 1.0f; } catch (...) { }', 'exception'),
    ('new', '', 'auto p = new float; (void)p;', 'new'),
    ('assembly', '', 'asm("nop");', 'assembly'),
    ('thread-local', 'thread_local int v;', '', 'thread_local'),
    ('dynamic-cast', 'struct s { int v; };', 's a; (void)dynamic_cast<thread s *>(&a);',
     'dynamic_cast'),
    ('std-namespace', '', 'x[0] = std::max(1.0f, 2.0f);', 'std::'),
    ('libc-header', '#include <cmath>', '', 'cmath'),
    ('libc-function', '', 'x[0] = sqrtf(2.0f);', 'sqrtf'),
    ('static-local', '', 'static int calls = 0; calls++;', 'static local'),
    ('mutable-global', 'float total = 0.0f;', 'total += x[0];', 'program-scope'),
    ('function-pointer', 'float f(float v) { return v; }',
     'float (*p)(float) = f; x[0] = p(1.0f);', 'function pointer'),
    ('recursion', 'uint f(uint v) { return v == 0u ? 0u : f(v - 1u); }', 'x[0] = float(f(n));',
     'recursion'),
    ('recursion-through-another',
     'uint g(uint v);\nuint f(uint v) { return v == 0u ? 0u : g(v - 1u); }\n'
     'uint g(uint v) { return f(v); }', 'x[0] = float(f(n));', 'recursion'),
    ('threadgroup-outside-kernel', 'void f() { threadgroup float v[2]; v[0] = 1.0f; }', '',
     'rule 4'),
    ('threadgroup-initialiser', '', 'threadgroup float v = 0.0f; x[0] = v;', 'rule 4'),
    ('lambda', '', 'auto f = [](float v) { return v; }; x[0] = f(1.0f);', 'lambda'),
    ('builtin', '', 'x[0] = float(__builtin_popcount(n));', 'builtin'),
    ('variable-length-array', '', 'float v[n]; v[0] = 1.0f; x[0] = v[0];', 'variable length'),
    ('designated-initialiser', 'struct s { int a; };', 's v = {.a = 1}; x[0] = float(v.a);',
     'designated'),
    ('structured-binding', 'struct s { int a, b; };', 's v = {1, 2}; auto [p, q] = v; '
     'x[0] = float(p + q);', 'C++17'),
    ('concept', 'template <typename T> concept c = true;', '', 'C++20'),
    ('ambiguous-max', '', 'x[0] = max(x[1], 1);', 'ambiguous'),
    ('ambiguous-min-of-signs', '', 'int v = 3; x[0] = float(min(v, n));', 'ambiguous'),
    ('ambiguous-half-float', '', 'x[0] = max(h[0], 1.0f);', 'ambiguous'),
    ('bfloat-math', '', 'x[0] = float(exp(b[0]));', 'deleted'),
    ('bfloat-from-half', '', 'b[0] = h[0];', 'bfloat'),
    ('vectors-of-two-types', '', 'float4 v = float4(0.0f) + half4(1.0h); x[0] = v.x;', 'invalid'),
    ('implicit-vector-conversion', '', 'half4 v = float4(0.0f); x[0] = float(v.x);', 'half'),
    ('nan-marker', '', 'x[0] = NAN;', 'rule 8'),
    ('infinity-marker', '', 'x[0] = -INFINITY;', 'rule 8'),
    ('isnan', '', 'x[0] = isnan(x[1]) ? 1.0f : 0.0f;', 'rule 8'),
    ('literal-without-f', '', 'x[0] = 1.5;', 'rule 9'),
    ('unknown-name', '', 'x[0] = simd_median(x[1]);', 'simd_median'),
    ('missing-return', 'float f(float v) { if (v > 0.0f) return v; }', 'x[0] = f(x[1]);',
     'return'),
    ('uninitialised-local', '', 'float v; x[0] = v;', 'uninitialized'),
]

# (name, whole text after the head, part of the message)
SIGNATURES = [
    ('index-used-twice', 'kernel void k(device float *x [[buffer(0)]], device float *y '
     '[[buffer(0)]]) { x[0] = y[0]; }', 'used twice'),
    ('index-without-attribute', 'kernel void k(device float *x) { x[0] = 1.0f; }', 'rule 3'),
    ('index-above-30', 'kernel void k(device float *x [[buffer(31)]]) { x[0] = 1.0f; }',
     'above 30'),
    ('pointer-argument-without-space', 'kernel void k(float *x [[buffer(0)]]) { x[0] = 1.0f; }',
     'rule 2'),
    ('unknown-attribute', 'kernel void k(device float *x [[buffer(0)]], uint i '
     '[[thread_index_in_warp]]) { x[i] = 1.0f; }', 'thread_index_in_warp'),
    ('tensor-header-without-guard', '#include <metal_tensor>\n', 'rule 10'),
]

# Text that must pass: what a kernel of the subset may write.
ACCEPTED = [
    ('pointer-arithmetic', 'float f(device const float *p, uint i) { return p[i]; }',
     'device const float *p = in + n; x[0] = f(p, 1u);'),
    ('threadgroup-pointer', '', 'threadgroup float *p = shared + 4; p[0] = 1.0f; x[0] = p[0];'),
    ('template-over-space', 'template <typename P> float f(P p) { return p[0]; }',
     'x[0] = f(x) + f(table);'),
    ('struct-by-constant-reference', 'struct s { uint a; float c; };\n'
     'float f(constant s &v) { return float(v.a) * v.c; }', 'x[0] = f(*(constant s *)table);'),
    ('thread-reference', 'void f(thread float &v) { v += 1.0f; }',
     'float v = 0.0f; f(v); x[0] = v;'),
    ('vector-load', '', 'float4 v = *(device const float4 *)(in + 4 * i); '
     'v.xy = v.zw * 2.0f; x[i] = dot(v, float4(1.0f)) + v.x;'),
    ('program-scope-constants', 'constant uint SIZE = 32;\nconstant float t[2] = {1.0f, 2.0f};\n'
     'float f(constant float *p) { return p[1]; }', 'x[0] = t[1] + float(SIZE) + f(t);'),
    ('function-constant', 'constant uint width [[function_constant(0)]];\n'
     'constant bool wide = is_function_constant_defined(width);',
     'x[0] = wide ? float(width) : 0.0f;'),
    ('if-constexpr', 'template <int N> float f(float v) { if constexpr (N > 1) return v * 2.0f; '
     'else return v; }', 'x[0] = f<2>(1.0f);'),
    ('bfloat-storage', '', 'b[0] = bfloat(float(b[1]) * 2.0f); h[0] = half(x[0]);'),
    ('casts-of-space', '', 'device uint *words = (device uint *)x; words[0] = as_type<uint>(1.0f);'
     ' threadgroup uint *t = (threadgroup uint *)shared; t[0] = 1u;'),
    ('overloads', 'float twice(float v) { return 2.0f * v; }\n'
     'float4 twice(float4 v) { return float4(twice(v.x), v.yzw); }', 'x[0] = twice(float4(1.0f)).x;'),
    ('atomics', '', 'atomic_fetch_add_explicit((device atomic_uint *)x, 1u, '
     'memory_order_relaxed);'),
    ('matrices', '', 'simdgroup_float8x8 m; simdgroup_load(m, shared, 8); '
     'simdgroup_multiply_accumulate(m, m, m, m); simdgroup_store(m, x, 8);'),
]


def check_refused(text, part):
    found = emu.lint(text, version=400)
    assert found, 'the text passes'
    assert any(part in line for line in found), f'refused, but not for "{part}": {found}'


def check_accepted(text):
    found = emu.lint(text)
    assert not found, found
    for version in emu.build.VERSIONS:
        emu.compile(text, 'fast', version)


def cases():
    for group in (ADDRESS_SPACES, REFUSED):
        for name, before, body, part in group:
            text = _KERNEL.format(before=before, body=body)
            yield f'refused/{name}', lambda t=text, p=part: check_refused(t, p)
    for name, text, part in SIGNATURES:
        yield f'refused/{name}', lambda t=_HEAD + text, p=part: check_refused(t, p)
    for name, before, body in ACCEPTED:
        text = _KERNEL.format(before=before, body=body)
        yield f'accepted/{name}', lambda t=text: check_accepted(t)
