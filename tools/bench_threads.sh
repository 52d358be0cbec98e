#!/bin/sh
# How the CPU levels scale with threads on a machine that has nothing but a shell.
#
#   tools/bench_threads.sh BINARY MODEL OUTDIR [KCHECK]
#
# BINARY is build/calla (with its shared libraries reachable, LD_LIBRARY_PATH will do), MODEL a model
# folder. Writes OUTDIR/threads.csv (decode at 256, prefill of 512; 1, 2, 4, ... threads, up to the
# processors or THREADS="1 2 ...") and OUTDIR/machine.txt; with KCHECK also OUTDIR/kcheck.txt, every
# op of the best level against the reference, three seeds. LEVELS="cpu/avx2 cpu/avx512" chooses
# levels; the default is the best one. Allow 10 minutes: with the full-size
# model one thread of a Xeon alone takes two, and kcheck more than one.
# tools/plot.py draws threads.csv.
set -eu
binary=$1
model=$2
out=$3
kcheck=${4:-}
mkdir -p "$out"

processors=$(getconf _NPROCESSORS_ONLN)
threads=${THREADS:-$(n=1; while [ $n -le "$processors" ] && [ $n -le 16 ]; do echo $n; n=$((n * 2)); done)}
levels=${LEVELS:-cpu}

comma() {
    # shellcheck disable=SC2086
    echo $1 | tr ' ' ','
}

{
    lscpu 2>/dev/null || true
    grep -E 'MemTotal|Hugepagesize' /proc/meminfo 2>/dev/null || true
    uname -a
} >"$out/machine.txt"

if [ -n "$kcheck" ]; then
    best=$("$kcheck" --pool real --op copy | sed -n 's|^copy *\(cpu/[a-z0-9]*\) .*|\1|p' | tail -1)
    : >"$out/kcheck.txt"
    for seed in 1 2 3; do
        "$kcheck" --seed $seed --level "$best" >>"$out/kcheck.txt" 2>&1 &
    done
    wait
fi
cat "$model"/*.safetensors >/dev/null
"$binary" bench -m "$model" --backends "$(comma "$levels")" --thread-counts "$(comma "$threads")" \
    --contexts 256 --prefill 512 --peak --csv >"$out/threads.csv"
cat "$out/threads.csv"
