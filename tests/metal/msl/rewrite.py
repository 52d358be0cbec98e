"""Metal text to C++ for clang: what C++ has not is rewritten, everything else is left alone.

  kernels           the keyword goes, a registration is appended (msl/kernels.py)
  address spaces    go, `constant` becomes const; in the lint build they become clang address
                    spaces, so that mixing them is a type error
  threadgroup T x;  becomes a reference into the emulator's threadgroup memory
  function constants become constants initialised when the library is loaded
  v.zyx             becomes v.template emu_get<2,1,0>()
  1.5, 2.0h         become 1.5f and a half: Metal has no double
"""
import re

from . import kernels as K
from .lex import (SourceError, Token, find_close, find_end, is_attribute, join, line_breaks,
                  split_commas, tokenize)

_SPACES = {'device': 1, 'constant': 2, 'threadgroup': 3}
_SWIZZLE = re.compile(r'^(?:[xyzw]{2,4}|[rgba]{2,4})$')
_ASSIGNMENTS = {'=', '+=', '-=', '*=', '/=', '%=', '&=', '|=', '^='}
_PLAIN_FLOAT = re.compile(r"^(?:\d[\d']*\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?$")
_HALF = re.compile(r"^(\d[\d']*\.?\d*(?:[eE][+-]?\d+)?|\.\d+)[hH]$")
_CLANG_ATTRIBUTE = re.compile(
    r'^(clang|gnu) ::|^(nodiscard|maybe_unused|likely|unlikely|fallthrough|noreturn)')
# Class types cannot lie behind an address-space pointer in C++: operator= has no such `this`.
_CLASS_TYPE = re.compile(r'^(packed_)?(bool|u?char|u?short|u?int|u?long|half|float|bfloat)'
                         r'\d(x\d)?$|^(vec|packed_vec|matrix|array|auto)$')


class Rewriter:
    def __init__(self, text, lint=False):
        self.tokens = tokenize(text)
        self.lint = lint
        self.out = []
        self.kernels = {}
        self.registrations = []
        self.function_constants = {}  # name -> index text
        self.scopes = []  # of the open braces: namespace, type, function, initialiser
        self.statement = []  # tokens since the last ; { }
        self.host_name, self.threads_max = None, '0'

    def run(self):
        i = 0
        while self.tokens[i].kind != 'end':
            i = self.step(i)
        self.out.append(self.tokens[i].before)
        registrations = [r.text(number, self.kernels)
                         for number, r in enumerate(self.registrations)]
        if not self.lint:  # clang does not convert a function of address spaces to a plain one
            self.out += ['\n# 1 "<registrations>"\n', *registrations]
        return ''.join(self.out)

    # ---- one construct at a time: each returns the index after what it consumed

    def step(self, i):
        t = self.tokens[i]
        if is_attribute(self.tokens, i):
            return self.attribute(i)
        if t.kind == 'name':
            handler = {
                'template': self.template, 'kernel': self.kernel, 'constant': self.constant,
                'threadgroup': self.threadgroup, 'device': self.address_space,
                'thread': self.address_space,
                'is_function_constant_defined': self.constant_defined,
            }.get(t.text)
            if handler:
                return handler(i)
            if _SWIZZLE.match(t.text) and self.tokens[i - 1].text in ('.', '->'):
                return self.swizzle(i)
        if t.kind == 'number':
            return self.number(i)
        if t.text in ('{', '}', ';'):
            return self.boundary(i)
        return self.keep(i)

    def emit(self, i, text):
        """Puts `text` in place of token i."""
        self.out.append(self.tokens[i].before + text)

    def drop(self, i, j):
        self.out.append(line_breaks(self.tokens[i:j]))

    def keep(self, i):
        self.emit(i, self.tokens[i].text)
        self.statement.append(self.tokens[i])
        return i + 1

    def in_function(self):
        return 'function' in self.scopes

    def attribute(self, i):
        close = find_close(self.tokens, i)
        is_kernel = False
        for part in split_commas(self.tokens[i + 2:close - 1]):
            text = join(part)
            self.host_name = K.read_host_name(part) or self.host_name
            limit = re.match(r'max_total_threads_per_threadgroup \( (.*) \)$', text)
            if limit:
                self.threads_max = f'({limit.group(1)})'
            is_kernel = is_kernel or text == 'kernel'
            if _CLANG_ATTRIBUTE.match(text):
                self.emit(i, f'[[{text}]]')
        self.drop(i, close + 1)
        if is_kernel:
            self.declare_kernel(close + 1)
        return close + 1

    def template(self, i):
        if self.statement or self.tokens[i + 1].text == '<':
            return self.keep(i)
        end = find_end(self.tokens, i)
        registration = K.read_instantiation(self.tokens[i:end])
        if not registration:
            return self.keep(i)
        self.registrations.append(registration)
        self.drop(i, end + 1)
        return end + 1

    def kernel(self, i):
        self.emit(i, '')
        self.declare_kernel(i + 1)
        return i + 1

    def declare_kernel(self, i):
        """The kernel whose return type begins at i."""
        while self.tokens[i].text != '(':
            i += 1
        name, close = self.tokens[i - 1], find_close(self.tokens, i)
        is_template = any(t.text == 'template' for t in self.statement)
        is_definition = self.tokens[close + 1].text != ';'
        if is_definition or name.text not in self.kernels:
            self.kernels[name.text] = K.Kernel(name, self.tokens[i + 1:close])
        if is_definition and not is_template:
            self.registrations.append(K.Registration(self.host_name or name.text, name.text,
                                                     name.text, self.threads_max))
        self.host_name, self.threads_max = None, '0'

    def constant(self, i):
        is_variable = not self.in_function() and 'type' not in self.scopes and \
            sum({'(': 1, ')': -1}.get(t.text, 0) for t in self.statement) == 0
        if not is_variable:
            return self.address_space(i)
        j = i
        while self.tokens[j].text not in ('=', ';', '{', '(') and \
                not is_attribute(self.tokens, j):
            j += 1
        if is_attribute(self.tokens, j):
            close = find_close(self.tokens, j)
            index = re.match(r'function_constant \( (.*) \)$',
                             join(self.tokens[j + 2:close - 1]))
            if index:
                return self.function_constant(i, j, close, index.group(1))
        # An array decays to a pointer into the constant space; a scalar is only read.
        is_array = any(t.text == '[' for t in self.tokens[i:j]) and \
            not any(_CLASS_TYPE.match(t.text) for t in self.tokens[i:j])
        space = ' __attribute__((address_space(2)))' if self.lint and is_array else ''
        self.emit(i, 'const' + space)
        self.statement.append(self.tokens[i])
        return i + 1

    def function_constant(self, i, j, close, index):
        name = self.tokens[j - 1].text
        type_text = join([t for t in self.tokens[i + 1:j - 1] if t.text != 'const'])
        self.function_constants[name] = index
        self.emit(i, f'static const {type_text} {name} = '
                     f'emu::function_constant<{type_text}>({index})')
        self.drop(i + 1, close + 1)
        return close + 1

    def constant_defined(self, i):
        close = find_close(self.tokens, i + 1)
        name = join(self.tokens[i + 2:close])
        if name not in self.function_constants:
            t = self.tokens[i]
            raise SourceError(f'{t.file}:{t.line}: error: {name} is no function constant')
        self.emit(i, f'emu::function_constant_defined({self.function_constants[name]})')
        return close + 1

    def threadgroup(self, i):
        if self.in_function() and not self.statement:
            end = find_end(self.tokens, i)
            declarators = split_commas(self.tokens[i + 1:end])
            if not self.is_pointer(declarators[0]):
                return self.threadgroup_variables(i, end, declarators)
        return self.address_space(i)

    @staticmethod
    def is_pointer(declarator):
        """`threadgroup T *p = ...` declares a pointer, not memory."""
        angle = 0
        for t in declarator:
            angle += {'<': 1, '>': -1}.get(t.text, 0)
            if angle == 0 and t.text in ('*', '&'):
                return True
            if angle == 0 and t.text in ('[', '=', '(', '{'):
                return False
        return False

    def threadgroup_variables(self, i, end, declarators):
        is_class = any(_CLASS_TYPE.match(t.text) for t in declarators[0])
        space = '__attribute__((address_space(3))) ' if self.lint and not is_class else ''
        names, types = [], []
        for declarator in declarators:
            name = self.declared_name(declarator)
            names.append(name)
            types.append(' '.join(t.text + '__type' * (t is name) for t in declarator))
        text = f'typedef {space}{", ".join(types)};'
        for name in (n.text for n in names):
            text += (f' static int {name}__slot = -1; auto &{name} = *({name}__type *)'
                     f'emu_threadgroup_variable(&{name}__slot, sizeof({name}__type), '
                     f'alignof({name}__type), "{name}");')
        self.emit(i, text)
        self.drop(i + 1, end + 1)
        return end + 1

    @staticmethod
    def declared_name(declarator):
        """The last name before the dimensions."""
        angle, name = 0, None
        for t in declarator:
            angle += {'<': 1, '>': -1}.get(t.text, 0)
            if t.text == '=':
                raise SourceError(f'{t.file}:{t.line}: error: subset rule 4: a threadgroup '
                                  f'variable has no initialiser')
            if angle == 0 and t.text == '[':
                break
            if angle == 0 and t.kind == 'name':
                name = t
        return name

    def address_space(self, i):
        t = self.tokens[i]
        text = 'const' if t.text == 'constant' else ''
        if self.lint and t.text in _SPACES and not self.is_class_pointee(i):
            text += f' __attribute__((address_space({_SPACES[t.text]})))'
        self.emit(i, text)
        self.statement.append(t)
        return i + 1

    def is_class_pointee(self, i):
        """Whether the type beside the address space at i is a vector, matrix or array."""
        skip = ('const', 'volatile', 'struct')
        j = i + 1
        while self.tokens[j].text in skip:
            j += 1
        if self.tokens[j].kind != 'name':  # `float4 device *`: the type stands before
            j = i - 1
            while self.tokens[j].text in skip:
                j -= 1
        if self.tokens[j].text == 'metal':
            j += 2
        return bool(_CLASS_TYPE.match(self.tokens[j].text))

    def swizzle(self, i):
        t = self.tokens[i]
        letters = 'xyzw' if t.text[0] in 'xyzw' else 'rgba'
        order = ','.join(str(letters.index(c)) for c in t.text)
        name = 'emu_at' if self.tokens[i + 1].text in _ASSIGNMENTS else 'emu_get'
        self.emit(i, f'template {name}<{order}>()')
        self.statement.append(t)
        return i + 1

    def number(self, i):
        t = self.tokens[i]
        half = _HALF.match(t.text)
        if half and not t.text.startswith('0x'):
            digits = half.group(1)
            self.emit(i, f'((half){digits}{"" if "." in digits else "."}f)')
        else:
            self.emit(i, t.text + 'f' * bool(_PLAIN_FLOAT.match(t.text)))
        self.statement.append(t)
        return i + 1

    def boundary(self, i):
        t = self.tokens[i]
        if t.text == '{':
            self.scopes.append(self.scope_kind())
        elif t.text == '}' and self.scopes:
            closed = self.scopes.pop()
            if closed == 'initialiser':
                self.emit(i, '}')
                self.statement = [Token('op', '=')]
                return i + 1
        self.emit(i, t.text)
        self.statement = []
        return i + 1

    def scope_kind(self):
        words = [t.text for t in self.statement]
        if self.in_function():
            return 'function'
        if 'namespace' in words:
            return 'namespace'
        if any(w in words for w in ('struct', 'class', 'union', 'enum')) and ')' not in words:
            return 'type'
        return 'function' if ')' in words and '=' not in words[:words.index(')')] else 'initialiser'


def rewrite(text, lint=False):
    return Rewriter(text, lint).run()
