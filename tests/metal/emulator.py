"""Runs Metal compute kernels on this CPU, one fiber a GPU thread, and says what is wrong with them.

    import emulator as emu
    library = emu.compile(pathlib.Path('norm.metal'), mode='checked')
    kernel = library.kernel('rms_norm', constants={0: ('bool', True)})
    x, y = emu.Buffer('f32', values), emu.Buffer('f32', len(values))
    findings = kernel.dispatch(groups=(rows,), threads=(256,), buffers=[x, y, emu.scalar('u32', n)])

README.md beside this file says more. One dispatch runs at a time; compile() may run in threads.
"""
import array
import ctypes
import math
import struct
import subprocess
import threading

import build
from build import BuildError, lint, missing  # noqa: F401 (part of this module's interface)

ORDERS = {'forward': 0, 'reverse': 1, 'random': 2}
BUFFERS_MAX = 31
TIMEOUT_MS = 20000

# kind -> code of the struct and array modules; bf16 is made of f32.
_CODES = {'f32': 'f', 'f16': 'e', 'u8': 'B', 'i8': 'b', 'u16': 'H', 'i16': 'h', 'u32': 'I',
          'i32': 'i', 'u64': 'Q', 'i64': 'q', 'bool': '?'}


class _Dispatch(ctypes.Structure):
    """struct emu_dispatch of runtime/emu.h."""
    _fields_ = [('kernel', ctypes.c_void_p), ('buffer', ctypes.c_void_p * BUFFERS_MAX),
                ('threadgroup_bytes', ctypes.c_uint32 * BUFFERS_MAX),
                ('grid', ctypes.c_uint32 * 3), ('threads', ctypes.c_uint32 * 3),
                ('grid_in_threads', ctypes.c_int32), ('order', ctypes.c_int32),
                ('seed', ctypes.c_uint32), ('flush_to_zero', ctypes.c_int32),
                ('timeout_ms', ctypes.c_uint32)]


class _Finding(ctypes.Structure):
    """struct emu_finding of runtime/emu.h."""
    _fields_ = [('kind', ctypes.c_char * 32), ('message', ctypes.c_char * 256),
                ('library', ctypes.c_char_p), ('offset', ctypes.c_uint64),
                ('threadgroup', ctypes.c_uint32 * 3), ('thread', ctypes.c_int32)]


class _Constant(ctypes.Structure):
    """struct emu_constant of runtime/emu.h."""
    _fields_ = [('index', ctypes.c_int), ('bytes', ctypes.c_int), ('value', ctypes.c_ubyte * 16)]


_runtime = None
_machine = threading.RLock()  # the runtime is one machine


def _load():
    global _runtime
    with _machine:
        if _runtime is None:
            # PyDLL: the interpreter's lock stays held, so no other thread enters the runtime.
            r = ctypes.PyDLL(str(build.runtime()), mode=ctypes.RTLD_GLOBAL)
            r.emu_library_open.restype = ctypes.c_void_p
            r.emu_library_kernel.restype = ctypes.c_void_p
            r.emu_library_kernel.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
            r.emu_library_kernel_name.restype = ctypes.c_char_p
            r.emu_library_kernel_name.argtypes = [ctypes.c_void_p, ctypes.c_int]
            r.emu_error.restype = ctypes.c_char_p
            r.emu_buffer_new.restype = ctypes.c_void_p
            r.emu_buffer_new.argtypes = [ctypes.c_uint64, ctypes.c_char_p]
            r.emu_buffer_free.argtypes = [ctypes.c_void_p]
            r.emu_finding.restype = ctypes.POINTER(_Finding)
            r.emu_switches.restype = ctypes.c_uint64
            r.emu_accesses.restype = ctypes.c_uint64
            _runtime = r
        return _runtime


def to_bf16(x):
    """The 16 bits of x rounded to bf16, nearest even."""
    bits = struct.unpack('<I', struct.pack('<f', x))[0]
    if math.isnan(x):
        return bits >> 16 | 0x40
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF


def from_bf16(bits):
    return struct.unpack('<f', struct.pack('<I', bits << 16))[0]


def _encode(kind, values):
    if kind == 'bf16':
        return array.array('H', (to_bf16(v) for v in values)).tobytes()
    if kind in ('f16', 'bool'):
        return struct.pack(f'<{len(values)}{_CODES[kind]}', *values)
    return array.array(_CODES[kind], values).tobytes()


def _decode(kind, data):
    if kind == 'bf16':
        return [from_bf16(v) for v in array.array('H', data)]
    if kind in ('f16', 'bool'):
        return list(struct.unpack(f'<{len(data) // struct.calcsize(_CODES[kind])}{_CODES[kind]}',
                                  data))
    return array.array(_CODES[kind], data).tolist()


class Buffer:
    """Device memory of exactly the size asked for. `content` is the values, or their count, and
    then the memory is filled with 0xCD; bytes are taken as they are."""

    def __init__(self, kind, content, name='buffer'):
        self.kind = kind
        if isinstance(content, int):
            data, size = None, content * (2 if kind == 'bf16' else struct.calcsize(_CODES[kind]))
        else:
            data = bytes(content) if isinstance(content, (bytes, bytearray, memoryview)) \
                else _encode(kind, content)
            size = len(data)
        if size == 0:
            raise ValueError(f'{name}: a Metal buffer has at least one byte')
        self.size, self.name = size, name
        self.address = _load().emu_buffer_new(size, name.encode())
        if data is not None:
            ctypes.memmove(self.address, data, size)

    def __del__(self):
        if _runtime is not None and getattr(self, 'address', None):
            _runtime.emu_buffer_free(self.address)

    def bytes(self):
        return ctypes.string_at(self.address, self.size)

    def values(self):
        return _decode(self.kind, self.bytes())

    def set(self, values):
        data = _encode(self.kind, values)
        if len(data) != self.size:
            raise ValueError(f'{self.name} holds {self.size} bytes, not {len(data)}')
        ctypes.memmove(self.address, data, len(data))


def scalar(kind, value):
    """A buffer of one value, for a `constant T &` argument."""
    return Buffer(kind, [value], f'{kind} argument')


def packed(layout, *values):
    """A buffer of a struct, in the notation of the struct module without alignment."""
    return Buffer('u8', struct.pack('<' + layout, *values), 'struct argument')


class Finding:
    """One thing that was wrong: kind, message, and `place`, the kernel's file and line."""

    def __init__(self, raw):
        self.kind, self.message = raw.kind.decode(), raw.message.decode()
        self.thread, self.threadgroup = raw.thread, tuple(raw.threadgroup)
        self.place = _place(raw.library.decode(), raw.offset) if raw.library else None

    def __str__(self):
        who = f' (thread {self.thread} of threadgroup {self.threadgroup})' if self.thread >= 0 \
            else ''
        return f'{self.place or "?"}: {self.kind}: {self.message}{who}'


def _place(library, offset):
    """file:line of the innermost frame that is the kernel's own text."""
    lines = subprocess.run(['addr2line', '-i', '-e', library, hex(offset)], capture_output=True,
                           text=True).stdout.split('\n')
    for line in lines:
        if line and '/prelude/emu_' not in line and not line.startswith('??'):
            return line.split(' (')[0]
    return None


class Kernel:
    def __init__(self, handle, name, library):
        self.handle, self.name, self._library = handle, name, library

    def dispatch(self, buffers, groups=None, grid=None, threads=(32,), threadgroup_bytes=None,
                 order='forward', seed=1, flush_to_zero=False, timeout_ms=TIMEOUT_MS):
        """Runs `groups` threadgroups, or a `grid` of threads, of `threads` threads each. `buffers`
        is a list (None leaves an index unbound) or a dict by index; an entry may be (buffer, byte
        offset). Returns the findings, an empty list when there are none."""
        if (groups is None) == (grid is None):
            raise ValueError('give groups= or grid=')
        d = _Dispatch(kernel=self.handle, grid_in_threads=grid is not None, order=ORDERS[order],
                      seed=seed, flush_to_zero=flush_to_zero, timeout_ms=timeout_ms)
        entries = buffers.items() if isinstance(buffers, dict) else enumerate(buffers)
        for index, entry in entries:
            buffer, offset = entry if isinstance(entry, tuple) else (entry, 0)
            d.buffer[index] = buffer.address + offset if buffer is not None else None
        for index, size in (threadgroup_bytes or {}).items():
            d.threadgroup_bytes[index] = size
        d.grid[:] = (tuple(groups or grid) + (1, 1))[:3]
        d.threads[:] = (tuple(threads) + (1, 1))[:3]
        with _machine:
            _runtime.emu_dispatch(ctypes.byref(d))
            self.switches, self.accesses = _runtime.emu_switches(), _runtime.emu_accesses()
            found, i = [], 0
            while raw := _runtime.emu_finding(i):
                found.append(Finding(raw.contents))
                i += 1
        return found


class Library:
    """A compiled .metal text."""

    def __init__(self, path):
        self.path = str(path)
        self._handle = self._open({})

    def _open(self, constants):
        array_type = _Constant * max(1, len(constants))
        values = array_type()
        for value, (index, (kind, content)) in zip(values, constants.items()):
            data = _encode(kind, [content])
            value.index, value.bytes, value.value[:len(data)] = index, len(data), data
        with _machine:
            handle = _load().emu_library_open(self.path.encode(), values, len(constants))
            if not handle:
                raise BuildError(_runtime.emu_error().decode())
        return handle

    def names(self):
        names, i = [], 0
        while name := _runtime.emu_library_kernel_name(self._handle, i):
            names.append(name.decode())
            i += 1
        return names

    def kernel(self, name, constants=None):
        """The kernel of that host name; `constants` maps a function constant's index to
        (kind, value)."""
        library = self._open(constants) if constants else self._handle
        handle = _runtime.emu_library_kernel(library, name.encode())
        if not handle:
            raise KeyError(f'no kernel {name}; there are {", ".join(self.names())}')
        return Kernel(handle, name, self)


def compile(source, mode='checked', version=310, defines=(), includes=()):
    """Compiles a pathlib.Path or Metal text; raises BuildError with the compiler's messages."""
    _load()
    return Library(build.kernel_library(source, mode, version, defines, includes))
