#!/usr/bin/env bash
# Ranks, planted faults and the plan over real NCCL, for a machine with two GPUs or more; with one, a single rank over NCCL.
#   benchmarks/nccl.sh [OUT]      OUT: folder for the results (default: benchmarks/results)
# Writes OUT/nccl.json with device, versions, date and every test's outcome.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
plugin=()
python -c 'import importlib.metadata as m; m.distribution("pytest-nsa")' 2>/dev/null || plugin=(-p pytest_nsa.plugin)
timeout 560 python -m pytest "${plugin[@]}" tests_gpu/test_nccl.py tests_gpu/test_plan.py -m gpu -v \
  --junitxml="$out/nccl_junit.xml" --artifacts "$out/nccl_artifacts"
python benchmarks/figures.py "$out/nccl_junit.xml" "$?" "$out/nccl.json"
