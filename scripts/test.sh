#!/usr/bin/env bash
# Set up, then check everything as CI does: ./scripts/test.sh
# With arguments, set up and run only pytest with them: ./scripts/test.sh tests/unit/data -k ledger
# What the tests reach, their processes too: ./scripts/test.sh --cov -n2 --dist=loadfile
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

./scripts/setup.sh --dev
export PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the ranks of one test share the cores

if (($#)); then exec pytest "$@"; fi

step() {
    printf '\n== %s\n' "$*"
    "$@"
}
step ruff check .
step ruff format --check .
step pyright
step hadolint Dockerfile
# Two workers, the longest files first; then, one after the other, what would fail if it were kept waiting for a core.
timed=(tests/faults/test_daily.py tests/faults/test_guardian.py)
parallel=(--numprocesses=2 --dist=loadfile --no-loadscope-reorder "${timed[@]/#/--ignore=}")
folders=(tests/faults tests/integration tests/native tests/house tests/contract tests/unit)
step pytest -q --durations=10 "${parallel[@]}" "${folders[@]}"
step pytest -q --durations=10 "${timed[@]}"
