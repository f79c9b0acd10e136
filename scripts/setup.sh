#!/usr/bin/env bash
# Make .venv ready: ./scripts/setup.sh [--dev] [--torch auto|cpu|cuda]
#
# --dev     also the tools of the tests
# --torch   cpu: the CPU-only wheel; cuda: the registry's torch; auto (default): cpu where no NVIDIA GPU is seen and
#           pip's sources offer a CPU-only wheel, else the registry's
#
# Needs Python 3.11+ and either pip or uv. Writes only inside the clone (.venv, uv.lock, wheelhouse/) and into the
# caches of pip and uv; where those of uv cannot be written, into .uv-cache. Run again, it does what is missing and
# nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
PATH=${PATH//"$PWD/.venv/bin:"/} # the environment has no pip of its own, so the Python that made it is asked
export PIP_ROOT_USER_ACTION=ignore
quiet=()
[[ -t 2 ]] || quiet=(--quiet) # progress bars are for people

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

has_pip() { "$python" -m pip --version >/dev/null 2>&1; }
works() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if works "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer on the PATH"
}

is_recent_uv() { # required-version of pyproject.toml
    local version
    version=$("$1" --version 2>/dev/null | awk '{print $2}')
    [[ -n $version ]] && printf '%s\n' 0.9 "$version" | sort -VC
}

fetch_uv() { # the version and hash of requirements.lock, without touching the user's Python
    say "no uv here: fetching it with pip"
    has_pip || die "$python has no pip, and there is no uv; install one of them"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    awk '/^uv==/ {on = 1} on {print} on && !/\\$/ {exit}' requirements.lock >"$scratch/uv.txt"
    "$python" -m pip install "${quiet[@]}" --require-hashes --no-deps --target "$scratch/uv" -r "$scratch/uv.txt"
    uv=$scratch/uv/bin/uv
}

find_uv() {
    had_uv=true uv=uv
    if is_recent_uv "$uv"; then return; fi
    had_uv=false uv=.venv/bin/uv
    if works .venv/bin/python && is_recent_uv "$uv"; then return; fi
    fetch_uv
}

find_cache() {
    local cache
    cache=$("$uv" cache dir 2>/dev/null) || cache=
    if mkdir -p "$cache" 2>/dev/null && [[ -w $cache ]]; then return; fi
    export UV_CACHE_DIR=$PWD/.uv-cache
    say "cannot write to uv's cache '$cache'; uv commands of your own need this, too: export UV_CACHE_DIR=$UV_CACHE_DIR"
}

pip_settings() { "$python" -m pip config list 2>/dev/null || true; }
pip_setting() { pip_settings | sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" | head -n 1; }

# uv does not read pip's configuration, and behind a proxy or a mirror that is where the certificates and the only
# reachable index are named.
honour_pip_settings() {
    local cert index
    if [[ -z ${SSL_CERT_FILE-} ]]; then
        cert=$(pip_setting cert)
        if [[ -f $cert ]]; then export SSL_CERT_FILE=$cert; fi
    fi
    [[ -z ${UV_DEFAULT_INDEX-}${UV_INDEX_URL-} ]] || return 0
    index=$(pip_setting index-url)
    [[ -n $index ]] || return 0
    export UV_DEFAULT_INDEX=$index
    say "using pip's index-url; uv commands of your own need it too: export UV_DEFAULT_INDEX=<that address>"
}

has_gpu() { [[ -e /proc/driver/nvidia/version || -e /dev/nvidiactl || -e /dev/dxg ]] || nvidia-smi -L >/dev/null 2>&1; }

torch_version() { sed -n 's/^constraint-dependencies = .*"torch==\([^"]*\)".*/\1/p' pyproject.toml; }
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

has_cpu_torch() { # for this Python
    local tag
    tag=cp$(python_version "$1" | tr -d .)
    compgen -G "wheelhouse/torch-$(torch_version)+cpu-$tag-*.whl" >/dev/null
}

# pip is asked because its sources (find-links, extra indexes) are where such a wheel is offered. With the local version
# +cpu named in full it cannot fall back to the registry's torch and its gigabytes of CUDA libraries.
fetch_cpu_torch() {
    local version errors
    version=$(torch_version)
    if has_cpu_torch "$python"; then return; fi
    if ! has_pip; then
        say "no NVIDIA GPU, but $python has no pip to ask for torch $version+cpu"
        return 1
    fi
    say "no NVIDIA GPU: asking pip's sources for torch $version+cpu"
    errors=$("$python" -m pip download "${quiet[@]}" --no-deps --only-binary :all: --dest wheelhouse \
        "torch==$version+cpu" 3>&1 1>&2 2>&3) && return
    # the first is the cause: a source that was not reached, or none that has it
    errors=$(grep -m 1 -E '^ERROR|connection broken|Could not fetch' <<<"$errors" || tail -n 1 <<<"$errors")
    say "pip: ${errors% (from versions*}"
    return 1
}

choose_torch() {
    case $torch in
        cuda) rm -f wheelhouse/torch-*+cpu-*.whl ;;
        cpu) fetch_cpu_torch || die "no CPU-only torch came; put its wheel into wheelhouse/" ;;
        auto)
            if compgen -G '.venv/lib/python*/site-packages/torch-*.dist-info' >/dev/null &&
                ! compgen -G '.venv/lib/python*/site-packages/torch-*+cpu.dist-info' >/dev/null; then return; fi
            if has_gpu || [[ $(uname -s) != Linux ]]; then return; fi
            fetch_cpu_torch || say "none came: taking the registry's torch with its CUDA libraries"
            ;;
    esac
}

# uv.lock is this machine's: it names the index and the wheels in use here. What it pins must be what requirements.lock
# pins, hash by hash, before anything is installed from it.
lock() {
    local offered=false locked=false here taken=()
    if has_cpu_torch "$1"; then offered=true; fi
    if grep -qs 'registry = "wheelhouse"' uv.lock; then locked=true; fi
    if [[ $offered != "$locked" ]]; then rm -f uv.lock; fi # an existing lock would keep the other torch
    if [[ $offered == true && $locked == false ]]; then    # of itself uv prefers the registry's, which covers more
        here="sys_platform == 'linux' and platform_machine == '$(uname -m)'"
        taken=(--upgrade-package "torch==$(torch_version)+cpu; $here and python_version == '$(python_version "$1")'")
    fi
    "$uv" lock --quiet --python "$1" "${taken[@]}"
    "$uv" export --quiet --frozen --all-groups --all-extras --no-emit-project | "$1" scripts/check_lock.py
}

dev=()
torch=auto
while (($#)); do
    case $1 in
        --dev) dev=(--group dev) ;;
        --torch)
            torch=${2-}
            shift
            ;;
        *) die "unknown argument $1; usage: ./scripts/setup.sh [--dev] [--torch auto|cpu|cuda]" ;;
    esac
    shift
done
[[ $torch =~ ^(auto|cpu|cuda)$ ]] || die "--torch needs auto, cpu or cuda, not '$torch'"

python=$(find_python)
find_uv
find_cache
honour_pip_settings
choose_torch
# Bytecode that Python may not keep is made here, once: else each process of a node compiles torch anew, 2 s of a core.
if [[ -n ${PYTHONDONTWRITEBYTECODE-} ]]; then export UV_COMPILE_BYTECODE=1; fi
works .venv/bin/python || "$uv" venv --quiet --clear --python "$python" .venv
lock .venv/bin/python
"$uv" sync --locked --inexact "${quiet[@]}" --python .venv/bin/python "${dev[@]}"
if [[ -n ${UV_COMPILE_BYTECODE-} ]]; then .venv/bin/python -m compileall -q src; fi
say ".venv is ready: $(.venv/bin/python --version), torch $(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')"
if [[ $had_uv == false ]]; then say "uv came with it; once per shell: source .venv/bin/activate"; fi
