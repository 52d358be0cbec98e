#!/bin/sh
# Compiles every kernel file with Apple's compiler: metal_shaders.sh metal3.1|metal3.2|metal4.0
# Files on TensorOps are Metal 4. METAL names another compiler than xcrun's.
set -eu
std=$1
for file in src/backend/metal/*.metal; do
    case $std:$file in
    metal3.*:*_tensor.metal) continue ;;
    esac
    echo "$std $file"
    ${METAL:-xcrun -sdk macosx metal} -std="$std" -Wall -c "$file" -o /dev/null
done
