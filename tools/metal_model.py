#!/usr/bin/env python3
"""Bytes, operations and dispatches of the Metal backend, and what they predict: metal_model.py

Prints the tables of docs/perf/metal-model.md from the model's dimensions and the kernels' own
numbers; `--check FILE` compares them with the tables in FILE. The times are predictions: counts over
public figures of the chips and the assumed shares below. No Mac has measured them."""
import sys

# Qwen3.6-35B-A3B
HIDDEN, VOCAB, DELTA_LAYERS, ATTENTION_LAYERS = 2048, 248320, 30, 10
LAYERS = DELTA_LAYERS + ATTENTION_LAYERS
EXPERTS, TOPK, WIDTH = 256, 8, 512
HEADS, KV_HEADS, HEAD = 16, 2, 256
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
Q4, Q8 = 4 / 8 + 4 / 64, 1 + 4 / 64  # bytes a weight: codes, and a bf16 scale and bias a group of 64

IN_DELTA = HIDDEN * (CHANNELS + VALUE_HEADS * DIM + 2 * VALUE_HEADS)
OUT_DELTA = HIDDEN * VALUE_HEADS * DIM
IN_ATTENTION = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD
OUT_ATTENTION = HIDDEN * HEADS * HEAD
EXPERT = 3 * HIDDEN * WIDTH
ROUTER = HIDDEN * (EXPERTS + 1)
HEAD_WEIGHTS = HIDDEN * VOCAB
STATE = VALUE_HEADS * DIM * DIM * 4  # bytes
CONV_STATE = 3 * CHANNELS * 4
KV_POSITION = KV_HEADS * HEAD * 2 * 2

# Assumed shares of the figures below, and the time from one dependent dispatch to the next.
OF_BANDWIDTH, DISPATCH = 0.75, 2e-6
OF_PRODUCTS, OF_TENSOR, OF_ATTENTION, OF_DELTA = 0.60, 0.45, 0.50, 0.30

# name, GB/s, TFLOP/s in f32, TFLOP/s of 16-bit products on TensorOps (0: none), GPU cores
CHIPS = [('M1', 68.25, 2.6, 0, 8), ('M1 Max', 409.6, 10.6, 0, 32), ('M4', 120, 4.6, 0, 10),
         ('M4 Max', 546, 18.4, 0, 40), ('M5', 153, 4.5, 17.5, 10), ('M5 Max', 614, 18, 70, 40)]
MIXER = 'convolution, state, gated norm'
CHUNK = 4096


def decode(ctx):
    """(part, layers, bytes, FLOPs, dispatches of a layer) of one token at a context."""
    merge = 1 if ctx > 256 else 0
    return [
        ('Gated DeltaNet projections', DELTA_LAYERS, (IN_DELTA + OUT_DELTA) * Q4,
         2 * (IN_DELTA + OUT_DELTA), 2),
        (MIXER, DELTA_LAYERS, 2 * (STATE + CONV_STATE),
         VALUE_HEADS * DIM * DIM * 7, 1),
        ('attention projections', ATTENTION_LAYERS, (IN_ATTENTION + OUT_ATTENTION) * Q4,
         2 * (IN_ATTENTION + OUT_ATTENTION), 2),
        ('append, attention, merge', ATTENTION_LAYERS, ctx * KV_POSITION,
         4 * HEADS * HEAD * ctx, 2 + merge),
        ('router', LAYERS, ROUTER * Q8, 2 * ROUTER, 1),
        ('8 experts, shared expert', LAYERS, (TOPK + 1) * EXPERT * Q4, 2 * (TOPK + 1) * EXPERT, 2),
        ('embedding, head, argmax', 1, HEAD_WEIGHTS * Q4, 2 * HEAD_WEIGHTS, 4)]


def delta_flops():
    """Of one row and value head in chunks of 16: S^T k, S^T q, update, its decay; products of rows."""
    state = 3 * DIM * DIM + DIM * DIM // 2
    rows = 2 * 2 * 16 * DIM + 16 * DIM + 8 * DIM
    return 2 * (state + rows)


def prefill(prompt, chunk=CHUNK):
    """(part, bytes, FLOPs, dispatches, kind) of a whole prompt. Bytes are what must come from memory
    at least: each weight once a chunk, K and V once a chunk, activations written and read once."""
    chunks = -(-prompt // chunk)
    rows = prompt
    pairs = sum(rows_of * (i * chunk) + rows_of * (rows_of + 1) / 2
                for i in range(chunks)
                for rows_of in [min(chunk, prompt - i * chunk)])
    kv = sum(min(prompt, (i + 1) * chunk) for i in range(chunks)) * KV_POSITION
    dense = DELTA_LAYERS * (IN_DELTA + OUT_DELTA) + ATTENTION_LAYERS * (IN_ATTENTION + OUT_ATTENTION)
    wide = 4 * rows * (DELTA_LAYERS * (2 * CHANNELS + 2 * VALUE_HEADS * DIM) +
                       ATTENTION_LAYERS * 2 * (2 * HEADS + 2 * KV_HEADS) * HEAD + LAYERS * 4 * HIDDEN)
    # Norm and projection; the one that adds to the residual.
    dense_dispatches = 3 * LAYERS
    experts_bytes = LAYERS * (chunks * (EXPERTS + 1) * EXPERT * Q4 +
                              rows * (TOPK + 1) * 4 * (2 * WIDTH + 2 * HIDDEN))
    return [
        ('dense projections', chunks * dense * Q4 + wide, 2 * rows * dense, chunks * dense_dispatches,
         'product'),
        ('delta rule', DELTA_LAYERS * rows * 4 * (4 * CHANNELS + 3 * VALUE_HEADS * DIM),
         DELTA_LAYERS * rows * VALUE_HEADS * delta_flops(), chunks * 3 * DELTA_LAYERS, 'delta'),
        ('append, attention', ATTENTION_LAYERS * (kv + rows * 4 * 3 * HEADS * HEAD),
         ATTENTION_LAYERS * 4 * HEADS * HEAD * pairs, chunks * 2 * ATTENTION_LAYERS, 'attention'),
        ('router', LAYERS * (chunks * ROUTER * Q8 + 8 * rows * HIDDEN), 2 * LAYERS * rows * ROUTER,
         chunks * 3 * LAYERS, 'exact'),
        ('experts, shared expert', experts_bytes, 2 * LAYERS * rows * (TOPK + 1) * EXPERT,
         chunks * 4 * LAYERS, 'product'),
        ('embedding, head, argmax', HEAD_WEIGHTS * Q4, 2 * HEAD_WEIGHTS,
         chunks + 3, 'exact')]


def seconds(parts, chip, tensor):
    _, bandwidth, f32, bf16, _ = chip
    rate = {'product': bf16 * OF_TENSOR if tensor else f32 * OF_PRODUCTS, 'exact': f32 * OF_PRODUCTS,
            'attention': f32 * OF_ATTENTION, 'delta': f32 * OF_DELTA}
    return sum(max(flops / (rate[kind] * 1e12), size / (OF_BANDWIDTH * bandwidth * 1e9)) +
               dispatches * DISPATCH for _, size, flops, dispatches, kind in parts)


def table(head, rows):
    lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
    return '\n'.join(lines + ['| ' + ' | '.join(row) + ' |' for row in rows])


def thousands(n):
    return f'{n:,.0f}'


def decode_table():
    contexts = (256, 4096, 131072)
    rows = []
    for i, (part, layers, size, flops, dispatches) in enumerate(decode(4096)):
        per_context = [decode(c)[i] for c in contexts]
        same = len({p[2] for p in per_context}) == 1
        rows.append([part, str(layers),
                     f'{size * layers / 1e6:,.1f}' if same else
                     ' / '.join(f'{p[2] * layers / 1e6:,.1f}' for p in per_context),
                     f'{flops * layers / 1e9:.2f}' if same else
                     ' / '.join(f'{p[3] * layers / 1e9:.2f}' for p in per_context),
                     str(dispatches * layers) if len({p[4] for p in per_context}) == 1 else
                     ' / '.join(str(p[4] * layers) for p in per_context)])
    total = [(sum(p[1] * p[2] for p in decode(c)), sum(p[1] * p[3] for p in decode(c)),
              sum(p[1] * p[4] for p in decode(c))) for c in contexts]
    rows.append(['**sum** at 256 / 4,096 / 131,072', '',
                 ' / '.join(thousands(t[0] / 1e6) for t in total),
                 ' / '.join(f'{t[1] / 1e9:.1f}' for t in total),
                 ' / '.join(str(t[2]) for t in total)])
    return table(['part', 'layers', 'MB a token', 'GFLOP a token', 'dispatches'], rows)


def decode_speed(chip, ctx, mixer_groups=VALUE_HEADS):
    """Tokens/s. The mixer has few threadgroups: a core moves no more than its share of the bandwidth
    for it; all other parts have more threadgroups than there are cores."""
    _, bandwidth, *_, cores = chip
    time = 0
    for part, layers, size, _, n in decode(ctx):
        share = min(1, mixer_groups / cores) if part == MIXER else 1
        time += layers * (size / (OF_BANDWIDTH * bandwidth * 1e9 * share) + n * DISPATCH)
    return 1 / time


def decode_times():
    rows = [[f'{chip[0]} ({chip[1]:g} GB/s)'] + [f'{decode_speed(chip, ctx):.0f}'
                                                 for ctx in (256, 4096, 131072)] for chip in CHIPS]
    return table(['chip', 'at 256', 'at 4,096', 'at 131,072'], rows)


def mixer_table():
    rows = [[chip[0], str(chip[4])] + [f'{decode_speed(chip, 256, n):.0f}'
                                       for n in (KEY_HEADS, VALUE_HEADS)] for chip in CHIPS]
    return table(['chip', 'cores', f'{KEY_HEADS} threadgroups', f'{VALUE_HEADS}'], rows)


def prefill_table():
    rows = []
    for (part, size, flops, n, _), (_, size_l, flops_l, n_l, _) in zip(prefill(4096), prefill(131072)):
        rows.append([part, f'{size / 1e9:.1f} / {size_l / 1e9:,.1f}',
                     f'{flops / 1e12:.2f} / {flops_l / 1e12:,.1f}', f'{n} / {n_l:,}'])
    short, far = prefill(4096), prefill(131072)
    rows.append(['**sum** of 4,096 / 131,072'] + [
        f'{sum(p[1] for p in short) / 1e9:.1f} / {sum(p[1] for p in far) / 1e9:,.0f}',
        f'{sum(p[2] for p in short) / 1e12:.1f} / {sum(p[2] for p in far) / 1e12:,.0f}',
        f'{sum(p[3] for p in short)} / {sum(p[3] for p in far):,}'])
    return table(['part', 'GB', 'TFLOP', 'dispatches'], rows)


def prefill_times():
    rows = []
    for chip in CHIPS:
        for tensor in (False, True) if chip[3] else (False,):
            way = 'TensorOps, f16' if tensor else 'simdgroup matrices, f32'
            speeds = [thousands(n / seconds(prefill(n), chip, tensor)) for n in (4096, 131072)]
            rows.append([chip[0], way] + speeds)
    return table(['chip', 'products', '4,096', '131,072'], rows)


def comparison_table():
    """Beside the published engine, by its description: where a count differs, and why."""
    def tokens(ctx):
        return sum(p[1] * p[4] for p in decode(ctx))
    dense = DELTA_LAYERS * (IN_DELTA + OUT_DELTA) + ATTENTION_LAYERS * (IN_ATTENTION + OUT_ATTENTION)
    pairs = ATTENTION_LAYERS * 131072 * 131073 / 2
    position = 2 * HEAD * 2  # bytes of one K and V row of one KV head
    delta = 18 + 24 + 1  # mixer, experts, residual
    attention = 20 + 24 + 1
    rows = [
        ['dispatches of a token at 256 / past it', f'{tokens(256)} / {tokens(4096)}', '595 / 605'],
        ['state and convolution, MB a token', f'{DELTA_LAYERS * 2 * (STATE + CONV_STATE) / 1e6:.0f}',
         f'{DELTA_LAYERS * (3 * STATE + CONV_STATE) / 1e6:.0f}: the state is read twice'],
        ['dispatches of 4,096 rows', str(sum(p[3] for p in prefill(4096))),
         f'about {DELTA_LAYERS * delta + ATTENTION_LAYERS * attention + 4:,}'],
        ['dense weights staged in bf16, GB in 4,096 rows', '0: tile by tile in threadgroup memory',
         f'{dense * 4 / 1e9:.1f}: written and read whole'],
        ['K and V through the caches, TB in 131,072 rows',
         f'{pairs * KV_HEADS / 4 * position / 1e12:.0f}: 4 rows x 8 heads share a load',
         f'{pairs * HEADS / 16 * position / 1e12:.0f}: 16 rows of one head do'],
        ['serial steps of the delta rule in 4,096 rows', str(4096 // 16), '4,096'],
    ]
    return table(['', 'here', 'published engine'], rows)


def main(arguments):
    tables = [decode_table(), decode_times(), mixer_table(), prefill_table(), comparison_table(), prefill_times()]
    if arguments[:1] == ['--check']:
        with open(arguments[1]) as file:
            text = file.read()
        missing = [t for t in tables if t not in text]
        for t in missing:
            print(f'{arguments[1]} lacks this table, or has another:\n\n{t}\n')
        return 1 if missing else 0
    print('\n\n'.join(tables))
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
