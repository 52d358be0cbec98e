"""What the front end learns of a kernel: its arguments, and the instances that get a name."""
import re

from .lex import SourceError, find_close, find_open, is_attribute, join, split_commas

# Attribute -> enum emu_argument_kind, by the end of its name.
POSITIONS = {
    'thread_position_in_grid': 'THREAD_POSITION_IN_GRID',
    'threadgroup_position_in_grid': 'THREADGROUP_POSITION_IN_GRID',
    'thread_position_in_threadgroup': 'THREAD_POSITION_IN_THREADGROUP',
    'threads_per_threadgroup': 'THREADS_PER_THREADGROUP',
    'dispatch_threads_per_threadgroup': 'DISPATCH_THREADS_PER_THREADGROUP',
    'threadgroups_per_grid': 'THREADGROUPS_PER_GRID',
    'threads_per_grid': 'THREADS_PER_GRID',
    'thread_index_in_threadgroup': 'THREAD_INDEX_IN_THREADGROUP',
    'thread_index_in_simdgroup': 'THREAD_INDEX_IN_SIMDGROUP',
    'simdgroup_index_in_threadgroup': 'SIMDGROUP_INDEX_IN_THREADGROUP',
    'simdgroups_per_threadgroup': 'SIMDGROUPS_PER_THREADGROUP',
    'threads_per_simdgroup': 'THREADS_PER_SIMDGROUP',
    'thread_execution_width': 'THREADS_PER_SIMDGROUP',
}


class Argument:
    """One argument: kind of attribute, index text, whether a function constant decides on it."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.optional = False
        self.attribute, self.index = None, None
        for i in range(len(tokens) - 1):
            if is_attribute(tokens, i):
                self._read_attribute(tokens[i + 2:find_close(tokens, i) - 1])

    def _read_attribute(self, tokens):
        for part in split_commas(tokens):
            text = join(part)
            indexed = re.match(r'(buffer|threadgroup|function_constant) \( (.*) \)$', text)
            if indexed and indexed.group(1) == 'function_constant':
                self.optional = True
            elif indexed:
                self.attribute, self.index = indexed.groups()
            else:
                self.attribute = text

    @property
    def place(self):
        return f'{self.tokens[0].file}:{self.tokens[0].line}'

    def text(self):
        return join(self.tokens)


class Kernel:
    def __init__(self, name, tokens):
        self.name, self.place = name.text, f'{name.file}:{name.line}'
        self.arguments = [Argument(part) for part in split_commas(tokens)]

    def registration_arguments(self):
        """The emu::arg<> list. Arguments without an attribute get the free buffer indices in
        order, as Metal's compiler gives them."""
        used = {a.index for a in self.arguments if a.attribute == 'buffer'}
        free = (str(i) for i in range(31) if str(i) not in used)
        out = []
        for a in self.arguments:
            if a.attribute is None:
                kind, index = 'BUFFER', next(free)
            elif a.attribute in ('buffer', 'threadgroup'):
                kind, index = a.attribute.upper(), a.index
            elif a.attribute in POSITIONS:
                kind, index = POSITIONS[a.attribute], '0'
            else:
                raise SourceError(f'{a.place}: error: unknown attribute [[{a.attribute}]] on an '
                                  f'argument of kernel {self.name}')
            out.append(f'emu::arg<EMU_ARG_{kind}, ({index}), {str(a.optional).lower()}>')
        return out


class Registration:
    """A name under which the host finds a kernel, and the expression that names the function."""

    def __init__(self, host_name, expression, kernel, threads_max='0'):
        self.host_name, self.expression, self.kernel = host_name, expression, kernel
        self.threads_max = threads_max

    def text(self, number, kernels):
        if self.kernel not in kernels:
            raise SourceError(f'error: "{self.host_name}" instantiates {self.kernel}, which is no '
                              f'kernel')
        arguments = ', '.join([f'(&{self.expression})']
                              + kernels[self.kernel].registration_arguments())
        return (f'static emu::registration<{arguments}> '
                f'emu_registration_{number}("{self.host_name}", {self.threads_max});\n')


def read_host_name(tokens):
    """host_name("x") of an attribute, or None."""
    match = re.match(r'host_name \( ((?:"[^"]*" ?)+)\)$', join(tokens))
    return ''.join(re.findall(r'"([^"]*)"', match.group(1))).strip() if match else None


def read_instantiation(tokens):
    """`template [[host_name("n")]] [[kernel]] void f<A>(...);` in its three spellings, without the
    semicolon: a Registration, or None when it instantiates no kernel."""
    host_name, is_kernel, rest, i = None, False, [], 1
    while i < len(tokens):
        if i + 1 < len(tokens) and is_attribute(tokens, i):
            close = find_close(tokens, i)
            for part in split_commas(tokens[i + 2:close - 1]):
                host_name = read_host_name(part) or host_name
                is_kernel = is_kernel or join(part) == 'kernel'
            i = close + 1
            continue
        if tokens[i].text == 'kernel':
            is_kernel = True
        else:
            rest.append(tokens[i])
        i += 1
    if not is_kernel:
        return None
    if rest[-1].text == ')':
        rest = rest[:find_open(rest, len(rest) - 1, '(')]
    if rest[-1].text != '>':
        raise SourceError(f'{tokens[0].file}:{tokens[0].line}: error: cannot read this '
                          f'instantiation of a kernel')
    angle = find_open(rest, len(rest) - 1, '<')
    name = rest[angle - 1].text
    expression = name + join(rest[angle:])
    return Registration(host_name or expression.replace(' ', ''), expression, name)
