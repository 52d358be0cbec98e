#!/bin/sh
# Asks the demo model a question; what `./bootstrap demo` ends with.
set -eu
calla=${1:-build/calla}
question="What is the capital of France?"
echo
echo "\$ $calla run --no-think --temp 0 -p \"$question\""
"$calla" run --no-think --temp 0 -p "$question"
cat <<EOF

That was the demo model: 14 MB, trained to show the engine, not to know things.
What to type next:
  $calla chat                       talk with it
  $calla run -p "Tell me a story about a fox."
  $calla run --think -p "What is 12 plus 7?"     thoughts, then the answer
  $calla run -m DIR -p "..."        a real model: a folder with Qwen3.6-35B-A3B in MLX 4-bit or HF bf16
  $calla info -m DIR                what a model is, and whether it fits here
  $calla --help                     all commands
EOF
