#!/bin/sh
# Checks and times the CUDA backend on a machine with a GPU and nothing else, within nine minutes.
#
#   tools/cuda_box.sh pack FILE.tar.gz [--programs]
#                                        here: builds, and packs programs, libraries and data; or
#                                        all but the data, to unpack over a copy of the tree there
#   tools/cuda_box.sh FORM [OPTION...] [PART...]
#                                        there, in the unpacked folder: all parts, or those named
#     run        together, since only right and wrong count: machine, synth (the checkpoint), kcheck
#                (three seeds), eval, cuda (test_cuda), texts (calla serve against cpu/ref); then one
#                after the other, the machine being quiet: decode (with and without steps queued
#                ahead), batches, prefill; and, if named, memory, kernels
#     sanitize   memcheck and racecheck of every op's edge shapes
#     ablate     every technique left out: without (kcheck), then steps, prompts, far, groups (bench)
#       --out DIR      results: summary.txt, all.txt with every part's output (default: results)
#       --seconds N    begin nothing that cannot end by then (default: 530)
#       --scratch DIR  room for a checkpoint of 19.5 GB, which stays there (default: /tmp/calla-box)
#       --backend B    another one in the place of cuda, to try this script without a GPU
#       --small        a tiny checkpoint and short lists, likewise
#
# A part ends as pass, FAIL, LATE (its time ran out) or SKIP, and stops no other; the script ends with
# the tail of each one's output and a line a part, and with 1 unless all that ran passed.

seconds_of() {
    case $1 in
    machine) echo 40 ;;
    kcheck | synth) echo 200 ;;
    eval | texts) echo 150 ;;
    cuda | without) echo 180 ;;
    decode) echo 200 ;;
    memcheck-* | racecheck-*) echo 300 ;;
    *) echo 120 ;;
    esac
}

skip() {
    echo "SKIP $1"
    exit 77
}

# ---- parts: each runs in a process of its own, under a timeout ------------------------------------

part_machine() {
    uname -srm
    nproc
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,mig.mode.current \
        --format=csv || echo "no nvidia-smi"
    build/calla bench --backend "$backend" --contexts 64 --decode 16
}

# The longest first; a process a seed, an op and a pool.
kcheck_runs() {
    for run in "attention random" "linear real" "attention real" "moe_experts real" kv_append \
        "attention edge" "moe_experts edge" "delta random" "delta real" "delta edge" "linear edge" \
        "moe_experts random" "linear random" moe_route embed argmax top copy; do
        for seed in 1 2 3; do
            echo "--seed $seed --op ${run% *}$(case $run in *' '*) echo " --pool ${run#* }" ;; esac)"
        done
    done
}

part_kcheck() {
    mkdir -p "$logs/kcheck"
    # shellcheck disable=SC2016
    kcheck_runs | timeout $((BOX_LIMIT - 3)) xargs -P "$(nproc)" -I{} sh -c \
        'build/kcheck --level "$1" $2 $3 >"$0/$(echo $3 | tr -dc a-z0-9_).out" 2>&1
         code=$?; [ $code = 0 ] || echo "FAIL ($code) $3"; exit $((code != 0))' \
        "$logs/kcheck" "$backend" "$kcheck_options" {}
    code=$?
    grep -h FAIL "$logs"/kcheck/*.out | head -n 20
    awk -v level="$backend" '$2 == level && /passed/ {
            pass[$1] += $3; fail[$1] += $5; skip[$1] += $7
            for (i = 8; i < NF; i++) if ($i == "error" && $(i + 1) > worst[$1]) worst[$1] = $(i + 1)
        } END { for (op in pass) printf "%-12s %5d passed, %d failed, %d skipped, worst %.3f\n", op,
            pass[op], fail[op], skip[op], worst[op] }' "$logs"/kcheck/*.out | sort
    return $code
}

# $1: least share of first choices, $2: mean, $3: perplexity.
eval_judge() {
    awk -v first="$1" -v mean="$2" -v off="$3" '{ print } NR > 1 {
        seen++; ratio = $7 - 1; if (ratio < 0) ratio = -ratio
        if ($5 + 0 < first || $4 > mean || ratio > off) { print "FAIL: beyond the bounds"; bad = 1 }
    } END { exit bad || !seen }'
}

part_eval() {
    failed=0
    for chunk in 1 512; do
        [ $chunk = 1 ] && mean=0.003 || mean=0.01 # a token at a time, products can be exact
        echo "chunk $chunk"
        # shellcheck disable=SC2086
        build/calla eval --backend "$backend" --reference tests/data/demo/reference.json \
            $demo_set --chunk $chunk | eval_judge 99 $mean 0.001 || failed=1
        for set in mlx4:fixture-mlx bf16:fixture-hf; do
            build/calla eval --backend "$backend" -m "tests/data/fixtures/${set#*:}" \
                --set "${set%:*}" --reference tests/data/fixtures/expected.json \
                --chunk $chunk | eval_judge 97 0.025 1 || failed=1
        done
    done
    return $failed
}

part_cuda() {
    [ "$backend" = cuda ] || skip "test_cuda is of cuda"
    CALLA_TEST_LONG=1 build/tests/test_cuda
    code=$?
    grep -q SKIPPED "$logs/cuda.txt" && skip "test_cuda found no GPU"
    return $code
}

part_texts() {
    command -v python3 >/dev/null || skip "there is no python3"
    python3 tools/cuda_texts.py build/calla "$backend" cpu/ref
}

part_synth() {
    [ -e "$scratch/done" ] && return
    # shellcheck disable=SC2086
    nice build/calla synth -o "$scratch/synth" $synth_options && touch "$scratch/done"
}

need_synth() {
    [ -e "$scratch/done" ] || skip "synth has not made the checkpoint"
}

bench() {
    build/calla bench -m "$scratch/synth" --backend "$backend" "$@"
}

# Passes bench's table on; it must have $1 lines with a digest, equal where context and batch are.
same_digests() {
    awk -F '|' -v lines="$1" '{ print } NF > 9 {
        digest = $10; gsub(/ /, "", digest)
        if (length(digest) != 16 || digest ~ /[^0-9a-f]/) next
        seen++; where = $4 "," $5
        if (where in was && was[where] != digest) { print "FAIL: other tokens"; bad = 1 }
        was[where] = digest
    } END { if (seen != lines) print "FAIL: " (seen + 0) " of " lines " lines"; exit bad || seen != lines }'
}

count() {
    echo $(($(echo "$1" | tr -dc , | wc -c) + 1))
}

part_decode() {
    need_synth
    set -- --contexts "$contexts" --peak
    lines=$(count "$contexts")
    [ "$backend" = cuda ] && set -- "$@" --ablate ahead && lines=$((2 * lines))
    bench "$@" | same_digests "$lines"
}

part_batches() {
    need_synth
    bench --contexts "$least" --batch "$batches" | same_digests "$(count "$batches")"
}

# One sequence is read through the engine, with the prefix cache; two by forward passes alone. The
# rates are of all tokens, so the difference is what the engine costs.
part_prefill() {
    need_synth
    bench --prefill "$prompts" && bench --prefill "$pairs" --batch 2
}

# A cap refuses before the weights are read, and names a context that then works.
part_memory() {
    need_synth
    run="build/calla run -m $scratch/synth --backend $backend --raw -p a -n 1 --ignore-eos --memory $cap"
    build/calla info -m "$scratch/synth" --backend "$backend"
    $run --ctx "$too_long" && return 1
    named=$($run --ctx "$too_long" 2>&1 | sed -n 's/.*use --ctx \([0-9]*\).*/\1/p')
    [ -n "$named" ] && echo "named: $named" && $run --ctx "$named"
}

part_kernels() {
    build/kcheck --level "$backend" --bench --csv "$out/kernels.csv"
}

part_sanitizer() {
    [ "$backend" = cuda ] || skip "compute-sanitizer is for cuda"
    command -v compute-sanitizer >/dev/null || skip "there is no compute-sanitizer"
    compute-sanitizer --tool "$1" --error-exitcode 1 build/kcheck --level cuda --pool edge --op "$2"
}

# ---- techniques left out --------------------------------------------------------------------------

# All that the backend knows; an error lists them.
techniques() {
    build/kcheck --level cuda --without '?' 2>&1 | sed -n 's/.*choose one of: //p' | tr -d ,
}

# Where one counts; what is new is timed as a step.
technique_place() {
    case $1 in
    grouped | chunks | flash) echo prompts ;;
    packing | split) echo far ;;
    batch) echo groups ;;
    *) echo steps ;;
    esac
}

techniques_of() {
    for name in $(techniques); do
        [ "$(technique_place "$name")" = "$1" ] && printf ',%s' "$name"
    done
}

need_names() {
    need_synth
    [ "$backend" = cuda ] || skip "techniques are left out on cuda only"
    names=$(techniques_of "$1")
    names=${names#,}
    [ -n "$names" ] || skip "the backend names no techniques"
}

# These are the same numbers in another order of events.
part_steps() {
    need_names steps
    bench --contexts "$least" --ablate "$names" | same_digests $(($(count "$names") + 1))
}

part_prompts() {
    need_names prompts
    bench --prefill 4096 --ablate "$names"
}

part_far() {
    need_names far
    bench --contexts 32768 --ablate "$names"
}

part_groups() {
    need_names groups
    bench --contexts "$least" --batch 8,32 --ablate "$names"
}

part_without() {
    [ "$backend" = cuda ] || skip "techniques are left out on cuda only"
    failed=0
    for name in $(techniques); do
        case $name in
        graphs | ahead | routing) ops="" ;; # nothing that kcheck sees; steps holds their digests
        packing | split | flash) ops=attention ;;
        chunks) ops="delta" ;;
        grouped) ops=moe_experts ;;
        batch) ops="moe_experts linear" ;;
        *) ops="linear delta attention moe_route moe_experts argmax top" ;;
        esac
        for op in $ops; do
            build/kcheck --level cuda --without "$name" --op "$op" --pool edge >"$logs/without.out" 2>&1 ||
                { failed=1 && echo "FAIL"; }
            grep -e FAIL -e passed "$logs/without.out" | sed "s/^/$name: /" | head -n 5
        done
    done
    return $failed
}

# ---- running them ---------------------------------------------------------------------------------

settings() {
    out=${BOX_OUT:-results} scratch=${BOX_SCRATCH:-/tmp/calla-box} backend=${BOX_BACKEND:-cuda}
    logs=$scratch/logs
    synth_options="" kcheck_options="" least=256 contexts=256,4096,32768,131072 batches=2,4,8,16,32
    prompts=512,4096,32768,131072 pairs=4096,32768 cap=20500 too_long=262144 demo_set=""
    if [ -n "$BOX_SMALL" ]; then
        synth_options="--layers 4 --hidden 256 --experts 16 --width 128 --vocab 4096"
        kcheck_options="--every 12 --cases 2" least=16 contexts=16,64 batches=2,3 prompts=64,300
        pairs=64 cap=128 demo_set="--set facts"
    fi
}

# The form's parts: those that run together, and those that run alone after them.
parts_of() {
    case $1 in
    run)
        together="machine synth kcheck eval cuda texts"
        alone="decode batches prefill" named="memory kernels"
        ;;
    ablate) together="machine synth without" alone="steps prompts far groups" named="" ;;
    sanitize)
        together=machine alone="" named=""
        for op in linear delta attention moe_experts moe_route kv_append embed argmax top copy; do
            together="$together memcheck-$op racecheck-$op"
        done
        ;;
    esac
}

left() {
    echo $((BOX_END - $(date +%s)))
}

# Runs a part under its timeout, keeps its output, and adds a line to the summary.
one() {
    limit=$(seconds_of "$1") start=$(date +%s)
    [ "$limit" -gt "$(left)" ] && limit=$(left)
    if [ "$limit" -lt 5 ]; then
        echo "$1: not run, no time is left" | tee -a "$out/summary.txt"
        return 0
    fi
    BOX_LIMIT=$limit timeout -k 5 "$limit" sh "$0" part "$1" >"$logs/$1.txt" 2>&1 </dev/null
    code=$?
    case $code in
    0) word=pass ;;
    77) word=$(grep '^SKIP' "$logs/$1.txt" | tail -n 1) ;;
    124 | 137) word="LATE after $limit s" ;;
    *) word="FAIL ($code)" ;;
    esac
    echo "$1: $word, $(($(date +%s) - start)) s" | tee -a "$out/summary.txt"
}

gather() {
    for f in "$out/summary.txt" "$logs"/*.txt; do
        echo "======== ${f##*/}"
        cat "$f"
    done >"$out/all.txt"
}

# What fits a reader who sees the last 12,000 characters: some of each part, then the summary.
show() {
    # shellcheck disable=SC2086
    some=$((10500 / $(echo $1 | wc -w)))
    for p in $1; do
        [ -e "$logs/$p.txt" ] || continue
        echo "======== $p"
        tail -c $some "$logs/$p.txt"
    done
    echo "======== summary"
    for p in $1; do
        grep "^$p: " "$out/summary.txt"
    done
}

run_form() {
    rm -rf "$logs"
    mkdir -p "$out" "$logs"
    : >"$out/summary.txt"
    now="" later=""
    for p in $together; do
        case " $* " in *" $p "*) now="$now $p" ;; esac
    done
    for p in $alone $named; do
        case " $* " in *" $p "*) later="$later $p" ;; esac
    done
    # shellcheck disable=SC2086
    [ -z "$now" ] || printf '%s\n' $now | xargs -P 8 -n 1 sh "$0" one
    for p in $later; do
        gather
        one "$p"
    done
    gather
    show "$now $later"
    ! grep -q -e FAIL -e LATE -e 'not run' "$out/summary.txt"
}

form=$1
case $form in
pack)
    set -e
    make CUDA=1 all build/kcheck build/tests/test_cuda
    box=$(mktemp -d)
    trap 'rm -rf "$box"' EXIT
    mkdir -p "$box/build/tests" "$box/lib" "$box/tools" "$box/tests"
    for f in calla kcheck tests/test_cuda; do
        strip -o "$box/build/$f" "build/$f"
    done
    ldd build/calla build/tests/test_cuda | awk '/=> \//{print $3}' | sort -u |
        grep -v '/lib\(c\|m\|resolv\|dl\|rt\|pthread\)\.so' | # what belongs to the system's libc
        while read -r lib; do cp -L "$lib" "$box/lib/"; done
    cp tools/cuda_box.sh tools/cuda_texts.py "$box/tools/"
    [ "$3" = --programs ] || { cp -r models "$box/" && cp -r tests/data "$box/tests/"; }
    tar czf "$2" -C "$box" .
    ;;
run | sanitize | ablate)
    shift
    parts_of "$form"
    BOX_END=$(($(date +%s) + 530)) parts=""
    while [ $# -gt 0 ]; do
        case $1 in
        --out) BOX_OUT=$2 && shift ;;
        --seconds) BOX_END=$(($(date +%s) + $2)) && shift ;;
        --scratch) BOX_SCRATCH=$2 && shift ;;
        --backend) BOX_BACKEND=$2 && shift ;;
        --small) BOX_SMALL=1 ;;
        *)
            case " $together $alone $named " in
            *" $1 "*) parts="$parts $1" ;;
            *) echo "cuda_box: $form has no option or part '$1'; $0 shows them" >&2 && exit 2 ;;
            esac
            ;;
        esac
        shift
    done
    LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH BOX_END BOX_OUT BOX_SCRATCH BOX_BACKEND BOX_SMALL
    settings
    # shellcheck disable=SC2086
    run_form ${parts:-$together $alone}
    ;;
one)
    settings
    one "$2"
    ;;
part)
    settings
    case $2 in
    memcheck-* | racecheck-*) part_sanitizer "${2%%-*}" "${2#*-}" ;;
    *) "part_$2" ;;
    esac
    ;;
*)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0"
    exit 2
    ;;
esac
