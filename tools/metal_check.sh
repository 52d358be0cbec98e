#!/bin/sh
# For owners of a Mac: metal_check.sh KCHECK [OPTION...]
#
# Checks every Metal op of both matrix paths against the C reference, a line an op, and times them,
# a line a case. The output is made to be pasted into a report. The options go to kcheck. Exit
# status: 0 when everything that this machine has passed, 1 when something failed or there is nothing.
kcheck=$1
shift
if [ "$(uname -s)" = Darwin ]; then
    sw_vers
    sysctl -n machdep.cpu.brand_string hw.memsize
fi
passed=0
failed=0
for level in metal/simdgroup metal/tensor; do
    "$kcheck" --level $level "$@"
    case $? in
    0)
        passed=$((passed + 1))
        "$kcheck" --level $level --bench "$@" || failed=$((failed + 1))
        ;;
    2) echo "SKIP $level: this GPU or this version of macOS has no such level" ;;
    *) failed=$((failed + 1)) ;;
    esac
done
echo "metal-check: $passed levels passed, $failed failed"
[ $passed -gt 0 ] && [ $failed -eq 0 ]
