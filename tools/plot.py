#!/usr/bin/env python3
"""Draws the CSV of `calla bench` as an SVG: decode and prefill rates over threads, a line a backend.
Of several contexts it takes the shortest that was decoded.

  tools/plot.py BENCH.csv OUT.svg
"""
import csv
import statistics
import sys

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 420, 300, 56, 40, 44
COLOURS = ["#1f6fb2", "#c2571a", "#3a8a3a", "#7a4fa3"]


def series(rows, column):
    """{backend: [(threads, median rate)]}"""
    found = {}
    for r in rows:
        if float(r[column]) > 0:
            found.setdefault(r["backend"], {}).setdefault(int(r["threads"]), []).append(float(r[column]))
    return {b: sorted((t, statistics.median(v)) for t, v in points.items()) for b, points in found.items()}


def panel(x0, title, lines):
    points = [p for line in lines.values() for p in line]
    threads = sorted({t for t, _ in points})
    top = max(v for _, v in points) * 1.15
    step = (WIDTH - LEFT - 20) / max(len(threads) - 1, 1)

    def at(t, v):
        return x0 + LEFT + threads.index(t) * step, HEIGHT - BOTTOM - v / top * (HEIGHT - TOP - BOTTOM)

    out = [f'<text x="{x0 + WIDTH / 2}" y="22" text-anchor="middle" font-weight="bold">{title}</text>']
    for i in range(5):
        value = top * i / 4
        _, y = at(threads[0], value)
        out.append(f'<line x1="{x0 + LEFT}" y1="{y:.1f}" x2="{x0 + WIDTH - 20}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.0f}</text>')
    for t in threads:
        x, y = at(t, 0)
        out.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{t}</text>')
    out.append(f'<text x="{x0 + WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">threads</text>')
    for n, (name, line) in enumerate(sorted(lines.items())):
        colour = COLOURS[n % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(t, v) for t, v in line))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for t, v in line:
            x, y = at(t, v)
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            out.append(f'<text x="{x:.1f}" y="{y - 7:.1f}" text-anchor="middle" fill="{colour}">{v:.1f}</text>')
        out.append(f'<text x="{x0 + LEFT + 10}" y="{TOP + 6 + 15 * n}" fill="{colour}">{name}</text>')
    return out


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], newline="") as f:
        rows = list(csv.DictReader(f))
    decoded = [int(r["context"]) for r in rows if float(r["decode_tok_s"]) > 0]
    if not decoded:
        sys.exit("plot.py: no line of the CSV has decoded")
    context = min(decoded)
    rows = [r for r in rows if int(r["context"]) == context]
    parts = panel(0, f"decode after {context}, tokens/s", series(rows, "decode_tok_s"))
    parts += panel(WIDTH, f"prefill of {context}, tokens/s", series(rows, "prefill_tok_s"))
    with open(sys.argv[2], "w") as f:
        f.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT}" '
                'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
                + "\n".join(parts) + "\n</svg>\n")


main()
