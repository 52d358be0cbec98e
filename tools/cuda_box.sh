#!/bin/sh
# Checks and times the CUDA backend on a machine with a GPU and nothing else.
#
#   tools/cuda_box.sh pack FILE.tar.gz    here: builds, and packs programs, libraries and data
#   tools/cuda_box.sh run [CALLA BENCH OPTIONS]
#                                         there, in the unpacked folder: kcheck with three seeds,
#                                         the end-to-end test, eval, sanitizer, a full-size
#                                         synthetic checkpoint and calla bench on it
set -e
case "$1" in
pack)
    make CUDA=1 all build/kcheck build/tests/test_cuda
    box=$(mktemp -d)
    trap 'rm -rf "$box"' EXIT
    mkdir -p "$box/build/tests" "$box/lib" "$box/tools" "$box/tests"
    for f in calla kcheck tests/test_cuda; do
        strip -o "$box/build/$f" "build/$f"
    done
    ldd build/calla build/tests/test_cuda | awk '/=> \//{print $3}' | sort -u |
        grep -v -e '/libc\.so' -e '/libm\.so' | while read -r lib; do cp -L "$lib" "$box/lib/"; done
    cp tools/cuda_box.sh "$box/tools/"
    cp -r models "$box/"
    cp -r tests/data "$box/tests/"
    tar czf "$2" -C "$box" .
    ;;
run)
    shift
    LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
    for seed in 1 2 3; do
        build/kcheck --level cuda --seed $seed
    done
    CALLA_TEST_LONG=1 build/tests/test_cuda
    for chunk in 1 512; do
        build/calla eval --backend cuda --reference tests/data/demo/reference.json --chunk $chunk
        build/calla eval --backend cuda -m tests/data/fixtures/fixture-mlx --set mlx4 \
            --reference tests/data/fixtures/expected.json --chunk $chunk
    done
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            compute-sanitizer --tool $tool --error-exitcode 1 build/kcheck --level cuda --pool edge
        done
    fi
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
    build/calla synth -o "$dir/synth"
    build/kcheck --level cuda --bench
    build/calla bench -m "$dir/synth" --backend cuda --chunk 4096 --contexts 256,4096,32768 "$@"
    ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
