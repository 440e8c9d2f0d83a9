#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests_gpu, then the GPU benchmarks. Writes JSON with device, versions and date.
#   benchmarks/gpu.sh [OUT [STAGES]]      OUT: folder for the results (default: benchmarks/results); STAGES: 'tests attention decode train'
# Further stages: tune writes OUT/tiles.json, the fastest tile sizes on this GPU, which belong into nsa/kernels/triton/tiles.json;
# parts times the selected branch with fewer parts in memory at once (`sequences.PARTS`), which may stay in the L2 cache;
# short has 7 minutes on an H200 with 16 cores: the paper's shape beside cuDNN, a decoded token, training of 125M, compiled and at 16k and 64k.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# A machine without a registry runs the checkout as it is; then the plugin must be named.
plugin=()
python -c 'import importlib.metadata as m; m.distribution("pytest-nsa")' 2>/dev/null || plugin=(-p pytest_nsa.plugin)
status=0
for stage in ${2:-tests attention decode train}; do
  case $stage in
    tests) timeout 560 python -m pytest "${plugin[@]}" tests_gpu -m gpu -n 2 -v --junitxml="$out/gpu_junit.xml" --artifacts "$out/gpu_artifacts" || status=$? ;;
    tune) cp -n nsa/kernels/triton/tiles.json "$out/tiles.json"; timeout 560 python benchmarks/tune_gpu.py --json "$out/tiles.json" || status=$? ;;
    attention) timeout 560 python benchmarks/attention_gpu.py --json "$out/attention_gpu.json" || status=$? ;;
    parts)
      for mib in 3072 512 256 128; do
        timeout 130 python benchmarks/attention_gpu.py --parts "$mib" --only selected nsa --shapes paper --lengths 65536 \
          --json "$out/attention_parts_$mib.json" || status=$?
      done ;;
    short)
      timeout 80 python benchmarks/attention_gpu.py --shapes paper --lengths 65536 8192 16384 --only sliding compressed selected nsa cudnn \
        --json "$out/attention_short.json" || status=$?
      timeout 60 python benchmarks/decode.py --lengths 65536 8192 --json "$out/decode_short.json" || status=$?
      timeout 80 python benchmarks/train.py --gpu --rounds 1 --lengths 16384 65536 --ways plain --json "$out/train_long.json" || status=$?
      timeout 200 python benchmarks/train.py --gpu --rounds 1 --lengths 2048 --ways 'step compiled, CUDA graphs' 'blocks compiled' \
        --json "$out/train_short.json" || status=$? ;;
    decode) timeout 200 python benchmarks/decode.py --json "$out/decode_gpu.json" || status=$? ;;
    train) timeout 560 python benchmarks/train.py --gpu --rounds 1 --minutes 8 --json "$out/train_gpu.json" || status=$? ;;
  esac
done
[ -f "$out/gpu_junit.xml" ] || exit "$status"
python benchmarks/figures.py "$out/gpu_junit.xml" "$status" "$out/gpu.json"
exit "$status"
