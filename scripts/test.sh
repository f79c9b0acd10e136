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
# Five processes, since many tests wait for processes of their own: at first three for tests that wait, and two for tests
# that compute, which find the two cores of CI free meanwhile. Then each goes on with what is left (tests/turns.py).
waiting=(tests/faults tests/integration tests/native)
computing=(tests/house tests/contract tests/unit)
if [[ $env != .venv ]]; then waiting=(tests/integration) computing=(tests/contract tests/unit); fi
said=$(mktemp -d)
turns=$(mktemp -d)
beside=()
trap 'kill "${beside[@]}" 2>/dev/null || true; rm -rf "$said" "$turns"' EXIT
share=(pytest -q --durations=10 -o console_output_style=classic -p no:cacheprovider --turns "$turns")
for number in 2 3; do
    "${share[@]}" "${waiting[@]}" "${computing[@]}" >"$said/pytest-$number" 2>&1 &
    beside+=($!)
done
for number in 4 5; do
    "${share[@]}" "${computing[@]}" "${waiting[@]}" >"$said/pytest-$number" 2>&1 &
    beside+=($!)
done
failed=0
if [[ $env == .venv ]]; then
    # 40 s of one core, of which tests that wait for processes leave some; a fifth more with a small young generation.
    NODE_OPTIONS=--max-semi-space-size=128 pyright >"$said/pyright" &
    beside+=($!)
    step ruff check . || failed=$?
    step ruff format --check . || failed=$?
    step hadolint Dockerfile || failed=$?
fi
step "${share[@]}" "${waiting[@]}" "${computing[@]}" || failed=$?
for checking in "${beside[@]}"; do wait "$checking" || failed=$?; done
for output in "$said"/*; do printf '\n== %s\n' "${output##*/}" && cat "$output"; done
exit "$failed"
