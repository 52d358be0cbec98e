#!/usr/bin/env python3
"""Writes src/text/unicode_table.h: what the tokenizer has to know of each code point.

usage: pip install unicodedata2==16.0.0 tokenizers==0.22.1; tools/unicode_table.py

Ids must not depend on the Unicode version of whatever library a machine has, and must equal those of
the `tokenizers` package. That package splits by Unicode 16 and normalises by Unicode 9; so the
classes come from unicodedata2 16.0.0 (checked here against `tokenizers`, code point by code point),
and a code point counts for form C when `tokenizers` treats it as Unicode 16 does. Decompositions
and combining classes of assigned code points never change (Unicode's stability policy), so for the
code points listed any later library gives the same result.
"""
import pathlib

import unicodedata2 as ucd
from tokenizers import Regex, normalizers, pre_tokenizers

WORD, NUMBER, SPACE, NFC = 1, 2, 4, 8
ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


def reference_class(pattern):
    """The code points that `tokenizers` matches with a one-character pattern."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    found = set()
    for at in range(0, len(ALL), 4096):
        block = ALL[at:at + 4096]
        kept = set("".join(piece for piece, _ in split.pre_tokenize_str("".join(map(chr, block)))))
        found.update(c for c in block if chr(c) not in kept)
    return found


def reference_agrees(normalise, text):
    return normalise(text) == ucd.normalize("NFC", text)


def nfc_code_points():
    """Code points that form C can change, move or compose, of those `tokenizers` knows."""
    normalise = normalizers.NFC().normalize_str
    found = set(range(0x1100, 0x1113)) | set(range(0x1161, 0x1176)) | set(range(0x11A7, 0x11C3))
    for c in ALL:
        ch = chr(c)
        parts = ucd.decomposition(ch)
        if ucd.combining(ch):
            probes = ["q" + ch + "\u0334", "q" + ch + "\u0323", "q" + ch + "\u0301",
                      "q\u0301" + ch, "q\u0323" + ch, "q\u0334" + ch]
            if all(reference_agrees(normalise, p) for p in probes):
                found.add(c)
        if 0xAC00 <= c <= 0xD7A3:
            found.add(c)
        elif parts and not parts.startswith("<"):
            spelled = "".join(chr(int(p, 16)) for p in parts.split())
            if reference_agrees(normalise, ch) and reference_agrees(normalise, spelled):
                found.add(c)
                found.update(map(ord, spelled))
    return found


def main():
    classes = [0] * 0x110000
    for c in ALL:
        kind = ucd.category(chr(c))[0]
        classes[c] = WORD if kind in "LM" else NUMBER if kind == "N" else 0
    spaces = reference_class(r"\s")
    for c in spaces:
        classes[c] |= SPACE
    for flag, pattern in ((WORD, r"[\p{L}\p{M}]"), (NUMBER, r"\p{N}")):
        ours = {c for c in ALL if classes[c] & flag}
        assert ours == reference_class(pattern), "tokenizers has another Unicode version"
    for c in nfc_code_points():
        classes[c] |= NFC
    entries = [f"0x{c << 4 | classes[c]:x}" for c in range(0x110000)
               if c == 0 or classes[c] != classes[c - 1]]
    out = pathlib.Path(__file__).resolve().parent.parent / "src/text/unicode_table.h"
    with open(out, "w") as f:
        f.write("/* Written by tools/unicode_table.py from Unicode 16.0 (\u00a9 Unicode, Inc., Unicode License V3).\n"
                " * First code point of each range << 4 | its enum unicode_flag bits. */\n")
        f.write("/* clang-format off */\n")
        f.write(f"static const uint32_t unicode_table[{len(entries)}] = {{\n")
        for at in range(0, len(entries), 9):
            f.write("    " + ", ".join(entries[at:at + 9]) + ",\n")
        f.write("};\n")
    print(len(entries), "ranges")


if __name__ == "__main__":
    main()
