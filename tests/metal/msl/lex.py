"""Tokens of preprocessed Metal text.

A token keeps the white space and line markers before it, so that joining `before + text` over all
tokens gives the input back: what the rewriter drops or adds never moves a line.
"""
import re

_TOKEN = re.compile(
    r'''(?P<string>"(?:\\.|[^"\\])*")|(?P<char>'(?:\\.|[^'\\])*')
      |(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)|(?P<name>[A-Za-z_]\w*)
      |(?P<op>::|->|\.\.\.|<<=|>>=|<=|>=|==|!=|&&|\|\||\+\+|--|[+\-*/%&|^]=|<<|.)''', re.X | re.S)
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')
# Hints that clang does not know or warns of; they change no meaning.
_HINT = re.compile(r'\s*#\s*pragma\s+(unroll|nounroll|METAL|clang\s+loop)')

OPENERS = {'(': ')', '[': ']', '{': '}'}


class Token:
    __slots__ = ('kind', 'text', 'before', 'file', 'line')

    def __init__(self, kind, text, before='', file='?', line=0):
        self.kind, self.text, self.before, self.file, self.line = kind, text, before, file, line

    def __repr__(self):
        return f'{self.file}:{self.line}:{self.text}'


class SourceError(Exception):
    """Text that the front end cannot read; the message names file and line."""


def tokenize(text):
    """The tokens of `clang -E` output, ended by one of kind 'end' that holds what follows the last.
    `>` is always a token of its own: `>>` closes two template lists more often than it shifts."""
    tokens, before, file, line = [], [], '?', 1
    for row in text.splitlines(keepends=True):
        if row.lstrip().startswith('#'):
            marker = _MARKER.match(row)
            if marker:
                file, line = marker.group(2), int(marker.group(1)) - 1
            before.append('\n' if _HINT.match(row) else row)
            line += 1
            continue
        position = 0
        while position < len(row):
            if row[position].isspace():
                before.append(row[position])
                position += 1
                continue
            match = _TOKEN.match(row, position)
            tokens.append(Token(match.lastgroup, match.group(), ''.join(before), file, line))
            before = []
            position = match.end()
        line += 1
    tokens.append(Token('end', '', ''.join(before), file, line))
    return tokens


def find_close(tokens, i):
    """The index of the bracket that closes the one at i."""
    opener, closer, depth = tokens[i].text, OPENERS[tokens[i].text], 0
    for j in range(i, len(tokens)):
        if tokens[j].text == opener:
            depth += 1
        elif tokens[j].text == closer:
            depth -= 1
            if depth == 0:
                return j
    raise SourceError(f'{tokens[i].file}:{tokens[i].line}: error: unclosed {opener}')


def find_open(tokens, i, opener):
    """The index of the bracket that the one at i closes; `opener` may be `<`."""
    closer, depth = tokens[i].text, 0
    for j in range(i, -1, -1):
        if tokens[j].text == closer:
            depth += 1
        elif tokens[j].text == opener:
            depth -= 1
            if depth == 0:
                return j
    raise SourceError(f'{tokens[i].file}:{tokens[i].line}: error: unopened {closer}')


def find_end(tokens, i):
    """The index of the semicolon that ends the statement at i."""
    depth = 0
    for j in range(i, len(tokens)):
        text = tokens[j].text
        if text == ';' and depth == 0:
            return j
        depth += text in OPENERS
        depth -= text in OPENERS.values()
    raise SourceError(f'{tokens[i].file}:{tokens[i].line}: error: statement without an end')


def split_commas(tokens):
    """The parts between commas outside brackets and template lists; none for no tokens."""
    parts, depth, angle = [[]], 0, 0
    for t in tokens:
        depth += t.text in OPENERS
        depth -= t.text in OPENERS.values()
        if depth == 0 and t.text == '<':
            angle += 1
        elif depth == 0 and t.text == '>' and angle:
            angle -= 1
        if t.text == ',' and depth == 0 and angle == 0:
            parts.append([])
        else:
            parts[-1].append(t)
    return parts if tokens else []


def is_attribute(tokens, i):
    """Whether `[[` opens an attribute at i."""
    return tokens[i].text == '[' and tokens[i + 1].text == '[' and tokens[i + 1].before == ''


def join(tokens):
    """The text in one line."""
    return ' '.join(t.text for t in tokens)


def line_breaks(tokens):
    """As many line breaks as the tokens span, for what is dropped."""
    return ''.join('\n' for t in tokens for c in t.before if c == '\n')
