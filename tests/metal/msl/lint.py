"""The conservative subset of Metal in which a backend is written, checked on the tokens.

What clang can decide (address spaces that do not fit, ambiguous overloads, conversions, C++17) it
decides in the lint build; see build.lint(). Rule numbers are those of README.md.
"""
import re

from .lex import Token, find_close, is_attribute, join, split_commas, tokenize

_BANNED = {
    'double': 'double', 'goto': 'goto', 'virtual': 'virtual', 'throw': 'an exception',
    'try': 'an exception', 'catch': 'an exception', 'new': 'new', 'delete': 'delete',
    'asm': 'inline assembly', '__asm__': 'inline assembly', 'dynamic_cast': 'dynamic_cast',
    'typeid': 'typeid', 'thread_local': 'thread_local', 'requires': 'C++20', 'concept': 'C++20',
    'co_await': 'C++20', 'co_yield': 'C++20', 'wchar_t': 'wchar_t', 'std': 'std::',
}
_NOT_A_NUMBER = {'emu_nan', 'emu_infinity', 'quiet_NaN', 'infinity', 'isnan', 'isinf', 'isfinite',
                 'isnormal'}
_SPACES = {'device', 'threadgroup', 'constant', 'thread'}
_SPECIFIERS = _SPACES | {'const', 'volatile', 'static', 'inline', 'constexpr', 'struct',
                         'signed', 'unsigned'}
_SCALARS = 'bool char uchar short ushort int uint long ulong half float bfloat'.split()
_TYPES = {a + b for a in _SCALARS for b in ('', '2', '3', '4')} | {
    'size_t', 'void', 'atomic_uint', 'atomic_int', 'atomic_float', 'float4x4', 'half4x4',
    'int8_t', 'uint8_t', 'int16_t', 'uint16_t', 'int32_t', 'uint32_t', 'int64_t', 'uint64_t'}
_PLAIN_FLOAT = re.compile(r"^(?:\d[\d']*\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?$")
_PROGRAM_SCOPE = {'constant', 'typedef', 'using', 'template', 'struct', 'enum', 'static_assert',
                  'extern', 'kernel', 'friend', 'class', 'union'}
_LAST_BUFFER = 30


def is_allowed(diagnostic):
    """Of the warnings about newer C++ in the lint build: `if constexpr` is part of the subset,
    the others that are named come from how TensorOps are used."""
    return any(text in diagnostic for text in (
        'constexpr if is', 'non-type template parameter of type',
        'class template argument deduction is', 'static_assert with no message'))


def readable(diagnostic):
    """A message of the lint build in Metal's words."""
    for number, space in (1, 'device'), (2, 'constant'), (3, 'threadgroup'):
        diagnostic = diagnostic.replace(f'__attribute__((address_space({number})))', space)
    return diagnostic


class Linter:
    def __init__(self, preprocessed, source, shim):
        self.found = []
        self.source = source
        everything = tokenize(preprocessed)
        self.uses_tensors = any(f'{shim}/metal_tensor' in t.before for t in everything)
        # What the shim's headers hold is not the kernel's own.
        self.tokens = [t for t in everything if not t.file.startswith(shim)]
        self.type_names = {self.tokens[i + 1].text for i, t in enumerate(self.tokens[:-1])
                           if t.text in ('struct', 'typename', 'class')}
        self.calls, self.definitions, self.overloads = {}, {}, {}

    def error(self, token, rule, message):
        self.found.append(f'{token.file}:{token.line}: error: subset rule {rule}: {message}')

    def run(self):
        for i, t in enumerate(self.tokens):
            self.check_word(i, t)
            self.check_pointer(i, t)
        self.check_scopes()
        self.check_recursion()
        self.check_headers()
        return self.found

    # ---- single tokens

    def check_word(self, i, t):
        before = self.tokens[i - 1].text if i else ''
        after = self.tokens[i + 1].text if t.kind != 'end' else ''
        member = before in ('.', '->')
        if t.text in _BANNED and not member and not (t.text == 'delete' and before == '='):
            self.error(t, 1, f'{_BANNED[t.text]} is not in Metal')
        if t.text == 'long' and after in ('long', 'double'):
            self.error(t, 1, f'long {after} is not in Metal')
        if t.kind == 'name' and t.text.startswith('__builtin'):
            self.error(t, 1, f'compiler builtin {t.text}')
        if t.text in _NOT_A_NUMBER:
            self.error(t, 8, 'NaN and infinity are no markers: fast math assumes that there are '
                             'none; use a large finite number')
        if t.kind == 'number' and _PLAIN_FLOAT.match(t.text):
            self.error(t, 9, f'{t.text} without f: write {t.text}f')
        if t.text == '.' and before in ('{', ',') and self.tokens[i + 2].text == '=':
            self.error(t, 1, 'designated initialiser')
        if t.text == '[' and before in ('=', '(', ',', 'return', '{', ';') and \
                not is_attribute(self.tokens, i) and not self.uses_tensors:
            close = find_close(self.tokens, i)
            if self.tokens[close + 1].text in ('(', '{'):
                self.error(t, 1, 'lambda outside a TensorOps file')

    def check_pointer(self, i, t):
        """`T *` or `T &` of a known type without an address space before it."""
        if t.text not in ('*', '&') or i == 0:
            return
        last = i - 1
        while self.tokens[last].text == 'const':
            last -= 1
        name = self.tokens[last].text
        if name not in _TYPES and name not in self.type_names:
            return
        first = last
        while first > 0 and (self.tokens[first - 1].text in _SPECIFIERS
                             or self.tokens[first - 1].text in _TYPES):
            first -= 1
        if not any(x.text in _SPACES for x in self.tokens[first:i]):
            what = 'pointer' if t.text == '*' else 'reference'
            self.error(t, 2, f'{what} without an address space: {name} {t.text}')

    # ---- functions and program scope

    def check_scopes(self):
        scopes, head, function, in_kernel, i = [], [], None, False, 0
        while self.tokens[i].kind != 'end':
            t = self.tokens[i]
            if is_attribute(self.tokens, i):
                close = find_close(self.tokens, i)
                head += [x for x in self.tokens[i:close] if x.text == 'kernel']
                i = close + 1
                continue
            in_function = 'function' in scopes
            if in_function:
                self.check_in_function(i, t, function, in_kernel, head)
            if t.text == '{':
                kind = self.scope_kind(head, in_function)
                if kind == 'function' and not in_function:
                    function, in_kernel = self.begin_function(head)
                scopes.append(kind)
            elif t.text == '}' and scopes:
                if scopes.pop() == 'initialiser':
                    head = [t]
                    i += 1
                    continue
            elif t.text == ';' and not in_function and 'type' not in scopes:
                self.check_program_scope(head)
            head = [] if t.text in '{};' else head + [t]
            i += 1

    @staticmethod
    def scope_kind(head, in_function):
        words = [t.text for t in head]
        if in_function:
            return 'function'
        if 'namespace' in words:
            return 'namespace'
        if ')' in words and '=' not in words[:words.index('(')]:
            return 'function'
        return 'type' if any(w in words for w in ('struct', 'class', 'union', 'enum')) \
            else 'initialiser'

    def begin_function(self, head):
        opening = next(i for i, t in enumerate(head) if t.text == '(')
        name = head[opening - 1].text
        self.definitions[name] = self.definitions.get(name, 0) + 1
        self.check_overload(name, head, opening)
        in_kernel = any(t.text == 'kernel' for t in head)
        if in_kernel:
            self.check_kernel(name, head[opening].line)
        return name, in_kernel

    def check_overload(self, name, head, opening):
        """One name for the same types in two address spaces: compilers differ on such."""
        closing = find_close(head + [Token('end', '')], opening)
        types, spaces = [], []
        for argument in split_commas(head[opening + 1:closing]):
            words = [t.text for t in argument]
            spaces.append([w for w in words if w in _SPACES])
            plain = [w for w in words if w not in _SPACES]
            types.append(' '.join(plain[:-1] if len(plain) > 1 else plain))
        known = self.overloads.setdefault((name, tuple(types)), spaces)
        if known != spaces:
            self.error(head[opening - 1], 2, f'{name} is overloaded by address space')

    def check_in_function(self, i, t, function, in_kernel, head):
        after = self.tokens[i + 1].text
        if t.text == 'static':
            self.error(t, 1, 'static local variable')
        if t.text == 'threadgroup' and not in_kernel and not head and self.declares_memory(i):
            self.error(t, 4, 'threadgroup variable outside a kernel function')
        if t.text == '(' and after == '*' and self.tokens[i + 3].text == ')' and \
                self.tokens[i + 4].text == '(':
            self.error(t, 1, 'function pointer variable')
        if t.kind == 'name' and after in ('(', '<'):
            self.calls.setdefault(function, set()).add(t.text)

    def declares_memory(self, i):
        while self.tokens[i].text not in ('*', '&', '[', '=', ';'):
            i += 1
        return self.tokens[i].text in ('[', '=', ';')

    def check_program_scope(self, head):
        words = [t.text for t in head]
        if not head or _PROGRAM_SCOPE & set(words) or words[0] in ('}', 'namespace'):
            return
        is_declaration = '(' in words and '=' not in words[:words.index('(')]
        if not is_declaration:
            self.error(head[0], 1, 'program-scope variable that is not constant')

    def check_kernel(self, name, line):
        """The argument list of a kernel, read again with its attributes."""
        for i, t in enumerate(self.tokens):
            if t.text == name and t.line == line and self.tokens[i + 1].text == '(':
                break
        else:
            return
        used = set()
        for argument in split_commas(self.tokens[i + 2:find_close(self.tokens, i + 1)]):
            text = join(argument)
            if '[ [' not in text:
                self.error(t, 3, f'argument without an attribute: {text}')
                continue
            index = re.search(r'\b(buffer|threadgroup) \( (.*?) \)', text)
            if not index:
                continue
            if index.groups() in used:
                self.error(t, 3, f'{index.group(1)} index {index.group(2)} used twice')
            used.add(index.groups())
            if index.group(2).isdigit() and int(index.group(2)) > _LAST_BUFFER:
                self.error(t, 3, f'buffer index {index.group(2)} above {_LAST_BUFFER}')
            if not re.search(r'\b(device|constant|threadgroup)\b', text.split('[ [')[0]):
                self.error(t, 2, f'kernel argument without an address space: {text}')

    def check_recursion(self):
        known = set(self.definitions)
        for name in sorted(known):
            seen, todo = set(), list(self.calls.get(name, ()))
            while todo:
                called = todo.pop()
                if called in seen or called not in known:
                    continue
                # An overload calls another of its name: that is no recursion.
                if called == name and self.definitions[name] == 1:
                    self.found.append(f'error: subset rule 1: recursion through {name}')
                    break
                seen.add(called)
                todo += self.calls.get(called, ())

    def check_headers(self):
        tensor = re.search(r'#\s*include\s*<(metal_tensor|MetalPerformancePrimitives/)',
                           self.source)
        if tensor and not re.search(r'#\s*if\s+__METAL_VERSION__\s*>=\s*400',
                                    self.source[:tensor.start()]):
            self.found.append('error: subset rule 10: TensorOps headers stand under '
                              '#if __METAL_VERSION__ >= 400')


def check(preprocessed, source, shim):
    return Linter(preprocessed, source, shim).run()
