#!/bin/sh
# Checks and times the CUDA backend on a machine with a GPU and nothing else, within ten minutes.
#
#   tools/cuda_box.sh pack FILE.tar.gz    here: builds, and packs programs, libraries and data
#   tools/cuda_box.sh run [OPTION...] [PIECE...]
#                                         there, in the unpacked folder: all pieces, or those named
#       --out DIR      results: summary.txt, all.txt, a file a piece (default: results)
#       --seconds N    begin nothing that cannot end by then (default: 590)
#       --scratch DIR  room for a checkpoint of 19.5 GB, which stays there (default: /tmp/calla-box)
#       --backend B    another one in the place of cuda, to try this script without a GPU
#       --small        a tiny checkpoint and short lists, likewise
#
# Together, since only right and wrong count: synth (the checkpoint), kcheck (three seeds), eval,
# cuda (test_cuda), texts (calla serve against cpu/ref), sanitizer, without (kcheck of what ablate
# times). Then one after the other, the
# machine being quiet: bench, ablate, prefill, memory, kernels.
# A piece ends as pass, FAIL, LATE (its time ran out) or SKIP, and the script with 1 unless all that
# ran passed.
together="machine kcheck eval cuda texts sanitizer without synth"
alone="bench ablate prefill memory kernels"

seconds_of() {
    case $1 in
    machine) echo 30 ;;
    kcheck) echo 240 ;;
    synth) echo 240 ;;
    eval | texts) echo 120 ;;
    cuda | sanitizer) echo 200 ;;
    bench) echo 170 ;;
    ablate) echo 200 ;;
    prefill | memory) echo 60 ;;
    *) echo 120 ;;
    esac
}

skip() {
    echo "SKIP $1"
    exit 77
}

# ---- pieces: each runs in a process of its own, under a timeout -----------------------------------

piece_machine() {
    uname -srm
    nproc
    nvidia-smi || echo "no nvidia-smi"
    build/calla bench --backend "$backend" --contexts 64 --decode 16
}

# All ops of a seed before the next seed; a file a run.
piece_kcheck() {
    for seed in 1 2 3; do
        for op in moe_experts attention linear delta moe_route kv_append embed argmax top copy; do
            echo $seed $op
        done
    done >"$out/kcheck-runs"
    # shellcheck disable=SC2016
    xargs -P "$(($(nproc) / 2 + 1))" -n 2 <"$out/kcheck-runs" sh -c \
        'build/kcheck --level "$1" --seed "$3" --op "$4" $2 >"$0/kcheck-$3-$4.txt" 2>&1
         code=$?; sed "s/^/seed $3: /" "$0/kcheck-$3-$4.txt" | grep -e worst -e FAIL -e kcheck:.*no
         exit $((code != 0))' "$out" "$backend" "$kcheck_options"
}

# The bounds of docs/architecture.md; $1: least share of first choices, $2: mean, $3: perplexity.
eval_judge() {
    awk -v first="$1" -v mean="$2" -v off="$3" '{ print } NR > 1 {
        seen++; ratio = $7 - 1; if (ratio < 0) ratio = -ratio
        if ($5 + 0 < first || $4 > mean || ratio > off) { print "FAIL: beyond the bounds"; bad = 1 }
    } END { exit bad || !seen }'
}

piece_eval() {
    failed=0
    for chunk in 1 512; do
        echo "chunk $chunk"
        # shellcheck disable=SC2086
        build/calla eval --backend "$backend" --reference tests/data/demo/reference.json \
            $demo_set --chunk $chunk | eval_judge 99 0.01 0.001 || failed=1
        for set in mlx4:fixture-mlx bf16:fixture-hf; do
            build/calla eval --backend "$backend" -m "tests/data/fixtures/${set#*:}" \
                --set "${set%:*}" --reference tests/data/fixtures/expected.json \
                --chunk $chunk | eval_judge 97 0.025 1 || failed=1
        done
    done
    return $failed
}

piece_cuda() {
    [ "$backend" = cuda ] || skip "test_cuda is of cuda"
    CALLA_TEST_LONG=1 build/tests/test_cuda >"$out/test_cuda.txt" 2>&1
    code=$?
    cat "$out/test_cuda.txt"
    grep -q SKIPPED "$out/test_cuda.txt" && skip "test_cuda found no GPU"
    return $code
}

piece_texts() {
    command -v python3 >/dev/null || skip "there is no python3"
    python3 tools/cuda_texts.py build/calla "$backend" cpu/ref
}

piece_sanitizer() {
    [ "$backend" = cuda ] || skip "compute-sanitizer is for cuda"
    command -v compute-sanitizer >/dev/null || skip "there is no compute-sanitizer"
    failed=0
    for op in moe_experts linear delta attention moe_route argmax top; do
        for tool in memcheck racecheck; do
            echo "$tool $op"
            timeout 60 compute-sanitizer --tool $tool --error-exitcode 1 build/kcheck --level cuda \
                --pool edge --op $op --every 3 || failed=1
        done
    done
    return $failed
}

piece_without() {
    [ "$backend" = cuda ] || skip "techniques are left out on cuda only"
    failed=0
    for pair in packing:attention split:attention flash:attention chunks:delta \
        grouped:moe_experts batch:moe_experts batch:linear overlap:delta overlap:moe_route; do
        echo "without ${pair%:*}"
        build/kcheck --level cuda --without "${pair%:*}" --op "${pair#*:}" --pool edge || failed=1
    done
    return $failed
}

piece_synth() {
    [ -e "$scratch/done" ] && return
    mkdir -p "$scratch"
    # shellcheck disable=SC2086
    nice build/calla synth -o "$scratch/synth" $synth_options && touch "$scratch/done"
}

need_synth() {
    [ -e "$scratch/done" ] || skip "synth has not made the checkpoint"
    model=$scratch/synth
}

piece_bench() {
    need_synth
    build/calla bench -m "$model" --backend "$backend" --contexts "$contexts" --peak &&
        build/calla bench -m "$model" --backend "$backend" --contexts "$least" --batch "$batches"
}

# Each technique where it counts.
piece_ablate() {
    [ "$backend" = cuda ] || skip "techniques are left out on cuda only"
    need_synth
    bench="build/calla bench -m $model --backend $backend"
    $bench --contexts "$least" --ablate graphs,overlap,routing &&
        $bench --prefill 4096 --ablate grouped,chunks,flash,routing &&
        $bench --contexts 32768 --ablate packing,split &&
        $bench --contexts "$least" --batch 8,32 --ablate batch
}

# One sequence is read through the engine, with the prefix cache; two by forward passes alone. The
# rates are of all tokens, so the difference is what the engine costs.
piece_prefill() {
    need_synth
    build/calla bench -m "$model" --backend "$backend" --prefill "$prompts" --batch 1,2
}

# A cap refuses before the weights are read, and names a context that then works.
piece_memory() {
    need_synth
    run="build/calla run -m $model --backend $backend --raw -p a -n 1 --ignore-eos --memory $cap"
    build/calla info -m "$model" --backend "$backend"
    $run --ctx "$too_long" && return 1
    named=$($run --ctx "$too_long" 2>&1 | sed -n 's/.*use --ctx \([0-9]*\).*/\1/p')
    [ -n "$named" ] && echo "named: $named" && $run --ctx "$named"
}

piece_kernels() {
    build/kcheck --level "$backend" --bench --csv "$out/kernels.csv"
}

# ---- running them ---------------------------------------------------------------------------------

settings() {
    out=${BOX_OUT:-results} scratch=${BOX_SCRATCH:-/tmp/calla-box} backend=${BOX_BACKEND:-cuda}
    synth_options="" kcheck_options="" least=256 contexts=256,4096,32768,131072 batches=2,4,8,16,32
    prompts=4096,32768 cap=20500 too_long=262144 demo_set=""
    if [ -n "$BOX_SMALL" ]; then
        synth_options="--layers 4 --hidden 256 --experts 16 --width 128 --vocab 4096"
        kcheck_options="--pool edge --every 8" least=16 contexts=16,64 batches=2,3 prompts=64,300
        cap=128 demo_set="--set facts"
    fi
}

left() {
    echo $((BOX_END - $(date +%s)))
}

# Runs a piece under its timeout, keeps its output, and adds a line to the summary.
one() {
    limit=$(seconds_of "$1") start=$(date +%s)
    [ "$limit" -gt "$(left)" ] && limit=$(left)
    if [ "$limit" -lt 5 ]; then
        echo "$1: not run, no time is left" | tee -a "$out/summary.txt"
        return
    fi
    timeout -k 5 "$limit" sh "$0" piece "$1" >"$out/$1.txt" 2>&1
    code=$?
    case $code in
    0) word=pass ;;
    77) word=$(tail -n 1 "$out/$1.txt") ;;
    124 | 137) word="LATE after $limit s" ;;
    *) word="FAIL ($code)" ;;
    esac
    echo "$1: $word, $(($(date +%s) - start)) s" | tee -a "$out/summary.txt"
}

gather() {
    for f in "$out"/summary.txt "$out"/[a-z]*.txt; do
        case $f in */all.txt) continue ;; esac
        echo "======== $f"
        cat "$f"
    done >"$out/all.txt"
}

run_all() {
    mkdir -p "$out"
    : >"$out/summary.txt"
    for p in $together; do
        case " $* " in *" $p "*) one "$p" & ;; esac
    done
    wait
    gather
    for p in $alone; do
        case " $* " in *" $p "*) one "$p" && gather ;; esac
    done
    gather
    cat "$out/summary.txt"
    ! grep -q -e FAIL -e LATE -e 'not run' "$out/summary.txt"
}

case "$1" in
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
    cp -r models "$box/"
    cp -r tests/data "$box/tests/"
    tar czf "$2" -C "$box" .
    ;;
run)
    shift
    BOX_END=$(($(date +%s) + 590)) pieces=""
    while [ $# -gt 0 ]; do
        case $1 in
        --out) BOX_OUT=$2 && shift ;;
        --seconds) BOX_END=$(($(date +%s) + $2)) && shift ;;
        --scratch) BOX_SCRATCH=$2 && shift ;;
        --backend) BOX_BACKEND=$2 && shift ;;
        --small) BOX_SMALL=1 ;;
        *)
            case " $together $alone " in
            *" $1 "*) pieces="$pieces $1" ;;
            *) echo "cuda_box: there is no option or piece '$1'; $0 shows them" >&2 && exit 2 ;;
            esac
            ;;
        esac
        shift
    done
    LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH BOX_OUT BOX_SCRATCH BOX_BACKEND BOX_SMALL
    settings
    # shellcheck disable=SC2086
    run_all ${pieces:-$together $alone}
    ;;
piece)
    settings
    "piece_$2"
    ;;
*)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0"
    exit 2
    ;;
esac
