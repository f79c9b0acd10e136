#!/usr/bin/env bash
# Set up, then check everything as CI does: ./scripts/test.sh
# With arguments, set up and run only pytest with them: ./scripts/test.sh tests/unit/data -k ledger
# What the tests reach, their processes too: ./scripts/test.sh --cov -n2 --dist=loadfile
# With another torch or Python, in an environment of its own such as .venv-torch-2.11, the unit, contract and integration tests:
#   ./scripts/test.sh --torch 2.11
#   ./scripts/test.sh --torch newest --python 3.12
# or only pytest with the arguments that follow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

env=.venv
setup=(--dev)
while [[ ${1-} =~ ^--(torch|python)$ ]]; do
    setup+=("$1" "${2?"$1 needs a version"}")
    env+=-${1#--}-$2
    shift 2
done
./scripts/setup.sh "${setup[@]}" --env "$env"
unset PYTHONDONTWRITEBYTECODE # what a test loads is compiled once, not by each process
export PATH=$PWD/$env/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the ranks of one test share the cores

if (($#)); then exec pytest "$@"; fi

step() {
    printf '\n== %s\n' "$*"
    "$@"
}
parallel=(-q --durations=10 --dist=loadfile --no-loadscope-reorder) # the longest files first
if [[ $env != .venv ]]; then
    step pytest "${parallel[@]}" --numprocesses=4 tests/integration tests/contract tests/unit
    exit
fi
# Two runs side by side: a worker imports and collects all that its run may give it. Tests of the first wait for
# processes, so those of the second find the two cores of CI free, and five workers keep them at work.
waiting=(tests/faults tests/integration tests/native)
computing=(tests/house tests/contract tests/unit)
# pytest rewrites the asserts of all tests before it runs them. Done once here, it is not done again by each worker.
pytest -q --collect-only "${waiting[@]}" "${computing[@]}" >/dev/null 2>&1 &
collecting=$!
said=$(mktemp -d)
beside=()
trap 'kill "${beside[@]}" 2>/dev/null || true; rm -rf "$said"' EXIT
# 40 s of one core, of which tests that wait for processes leave some; a fifth more with a small young generation.
NODE_OPTIONS=--max-semi-space-size=128 pyright >"$said/pyright" &
beside+=($!)
step ruff check .
step ruff format --check .
step hadolint Dockerfile
wait "$collecting" || true # pytest says itself what is wrong
pytest "${parallel[@]}" --numprocesses=2 "${computing[@]}" >"$said/pytest" 2>&1 &
beside+=($!)
failed=0
step pytest "${parallel[@]}" --numprocesses=3 "${waiting[@]}" || failed=$?
for checking in "${beside[@]}"; do wait "$checking" || failed=$?; done
for output in "$said"/*; do printf '\n== %s\n' "${output##*/}" && cat "$output"; done
exit "$failed"
