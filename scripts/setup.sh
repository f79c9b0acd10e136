#!/usr/bin/env bash
# Make .venv ready: ./scripts/setup.sh [--dev] [--torch auto|cpu|cuda|RELEASE] [--python VERSION] [--env FOLDER]
#
# --dev     also the tools of the tests
# --torch   cpu: the CPU-only wheel; cuda: the registry's torch; auto (default): cpu where no NVIDIA GPU is seen and
#           pip's sources or PyTorch's own index offer a CPU-only wheel, else the registry's; a release such as 2.11, or
#           newest: that one instead of the pinned one, chosen as with auto, and all else as in requirements.lock
# --python  such as 3.12, instead of the first on the PATH that is recent enough
# --env     another folder than .venv
#
# Needs Python 3.11+ and either pip or uv. Writes only inside the clone (.venv, uv.lock, wheelhouse/) and into the
# caches of pip and uv; where those of uv cannot be written, into .uv-cache. Run again, it does what is missing and
# nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
cpu_index=https://download.pytorch.org/whl/cpu
shopt -s extglob
PATH=${PATH//"$PWD"\/.venv*([^:\/])\/bin:/} # an environment has no pip of its own, so the Python that made it is asked
export PIP_ROOT_USER_ACTION=ignore

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

has_pip() { "$python" -m pip --version >/dev/null 2>&1; }
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
works() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        [[ -z $wanted_python || $(python_version "$1") == "$wanted_python" ]]
}

find_python() {
    local candidate
    for candidate in ${wanted_python:+"python$wanted_python"} python3 python3.14 python3.13 python3.12 python3.11; do
        if works "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    if [[ -z $wanted_python ]]; then die "no Python 3.11 or newer on the PATH"; fi
    uv python find --quiet --no-python-downloads "$wanted_python" 2>/dev/null ||
        die "no Python $wanted_python on the PATH, nor one of uv's; install it, e.g. with: uv python install $wanted_python"
}

is_recent_uv() { # required-version of pyproject.toml
    local version
    version=$("$1" --version 2>/dev/null | awk '{print $2}')
    [[ -n $version ]] && printf '%s\n' 0.9 "$version" | sort -VC
}

fetch_uv() { # the version and hash of requirements.lock, without touching the user's Python
    say "no uv here: fetching it with pip"
    has_pip || die "$python has no pip, and there is no uv; install one of them"
    awk '/^uv==/ {on = 1} on {print} on && !/\\$/ {exit}' requirements.lock >"$scratch/uv.txt"
    "$python" -m pip install --require-hashes --no-deps --target "$scratch/uv" -r "$scratch/uv.txt"
    uv=$scratch/uv/bin/uv
}

find_uv() {
    had_uv=true uv=uv
    if is_recent_uv "$uv"; then return; fi
    had_uv=false uv=$env/bin/uv
    if works "$env/bin/python" && is_recent_uv "$uv"; then return; fi
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

is_release() { [[ ! $torch =~ ^(auto|cpu|cuda)$ ]]; } # instead of the pinned one
pinned_torch() { sed -n 's/^constraint-dependencies = .*"torch==\([^"]*\)".*/\1/p' pyproject.toml; }

# The pins for another torch: of requirements.lock all but what a torch brings with it, and that as the registry's asks.
resolve_torch() {
    local range
    range=$(sed -n 's/^    "\(torch[^"]*\)",$/\1/p' pyproject.toml)
    awk '/^[a-z0-9]/ {on = !/^((torch|triton|setuptools)==|cuda-|nvidia-)/} on' requirements.lock >"$scratch/others.txt"
    if [[ $torch != newest ]]; then range+=$'\n'torch==$torch.*; fi
    "$uv" pip compile --quiet --no-config --python "$python" --constraint "$scratch/others.txt" \
        --output-file "$scratch/torch.txt" - <<<"$range" >/dev/null ||
        die "the index has no torch $torch for $("$python" --version)"
    sed -n 's/^torch==\([^ ]*\).*/\1/p' "$scratch/torch.txt"
}

has_cpu_torch() { # for this Python
    local tag
    tag=cp$(python_version "$1" | tr -d .)
    compgen -G "wheelhouse/torch-$torch_version+cpu-$tag-*.whl" >/dev/null
}

# Whether an address answers within seconds: behind a firewall that drops what it does not know, pip would wait minutes.
answers() {
    timeout 5 "$python" -c 'import sys, urllib.request as web; web.urlopen(web.Request(sys.argv[1], method="HEAD"))' \
        "$1" >/dev/null 2>&1
}

# With the local version +cpu named in full pip cannot fall back to the registry's torch and its gigabytes of CUDA
# libraries. Whatever it says comes to standard error, and its errors to standard output.
download_cpu_torch() {
    local pip=("$python" -m pip)
    if ! has_pip; then pip=("$uv" tool run --quiet --python "$python" pip); fi # as Debian and uv bring their Pythons
    "${pip[@]}" download --no-deps --only-binary :all: --dest wheelhouse "$@" "torch==$torch_version+cpu" 3>&1 1>&2 2>&3
}

# This machine's own sources (find-links, extra indexes) come first; a mirror may be all that it shall use.
fetch_cpu_torch() {
    local errors
    if has_cpu_torch "$python"; then return; fi
    say "no NVIDIA GPU: asking pip's sources for torch $torch_version+cpu"
    errors=$(download_cpu_torch) && return
    if answers "$cpu_index/torch/"; then
        say "not there; asking PyTorch's own index of CPU wheels, $cpu_index"
        errors=$(download_cpu_torch --index-url "$cpu_index") && return
    fi
    # the first is the cause: a source that was not reached, or none that has it
    errors=$(grep -m 1 -E '^ERROR|connection broken|Could not fetch' <<<"$errors" || tail -n 1 <<<"$errors")
    say "pip: ${errors% (from versions*}"
    return 1
}

choose_torch() {
    case $torch in
        cuda) rm -f wheelhouse/torch-*+cpu-*.whl ;;
        cpu) fetch_cpu_torch || die "no CPU-only torch came; put its wheel into wheelhouse/" ;;
        *)
            if compgen -G "$env/lib/python*/site-packages/torch-*.dist-info" >/dev/null &&
                ! compgen -G "$env/lib/python*/site-packages/torch-*+cpu.dist-info" >/dev/null; then return; fi
            if has_gpu || [[ $(uname -s) != Linux ]]; then return; fi
            fetch_cpu_torch || say "none came: taking the registry's torch with its CUDA libraries; for a CPU-only one stop" \
                "here, set PIP_EXTRA_INDEX_URL=<a mirror of $cpu_index> or lay its wheel into wheelhouse/, and begin again"
            ;;
    esac
}

# uv.lock is this machine's: it names the index and the wheels in use here. What it pins must be what requirements.lock
# pins, hash by hash, before anything is installed from it.
lock() {
    local offered=false locked=false
    if has_cpu_torch "$1"; then offered=true; fi
    if grep -qs 'registry = "wheelhouse"' uv.lock; then locked=true; fi
    # an existing lock would keep the other torch, or what requirements.lock pinned before
    if [[ -f uv.lock && $offered == "$locked" ]] && "$uv" lock --quiet --python "$1" && is_as_pinned "$1" 2>/dev/null; then
        return
    fi
    rm -f uv.lock
    lock_anew "$1" "$offered"
    is_as_pinned "$1"
}

is_as_pinned() { "$uv" export --quiet --frozen --all-groups --all-extras --no-emit-project | "$1" scripts/check_lock.py; }

# With every pin named, since a mirror shows some releases weeks after their upload and would then resolve to others.
lock_anew() {
    local pin pins=() here
    while IFS= read -r pin; do pins+=(--upgrade-package "$pin"); done \
        < <(sed -n 's/^\([a-z0-9][^\\]*[^ \\]\) *\\*$/\1/p' requirements.lock | if "$2"; then grep -v '^torch=='; else cat; fi)
    if "$2"; then # of itself uv prefers the registry's, which covers more
        here="sys_platform == 'linux' and platform_machine == '$(uname -m)'"
        pins+=(--upgrade-package "torch==$torch_version+cpu; $here and python_version == '$(python_version "$1")'")
    fi
    "$uv" lock --quiet --python "$1" "${pins[@]}"
}

# Say what a command of uv is about to download: its dry run names what its cache lacks, the registry the sizes.
announce() {
    local megabytes
    "$uv" "$@" --dry-run --verbose 2>&1 | sed -n 's/^DEBUG Identified uncached distribution: \([^ +]*==[^ +]*\)$/\1/p' |
        awk -F == '!seen[$1]++' >"$scratch/new.txt" || return 0 # a build may need another setuptools than the environment
    [[ -s $scratch/new.txt ]] || return 0
    megabytes=$("$uv" pip compile --quiet --no-config --no-deps --python "$python" --format pylock.toml "$scratch/new.txt" |
        awk -F 'size = ' '/^wheels = / {sum += $2} END {printf "%.0f", sum / 1e6}') || return 0
    say "about $megabytes MB to download; wheels that uv's cache lacks: $(wc -l <"$scratch/new.txt")"
}

run_announced() {
    announce "$@"
    "$uv" "$@"
}

install_locked() {
    lock "$env/bin/python"
    run_announced sync --locked --inexact --python "$env/bin/python" "${dev[@]}"
}

install_release() {
    local build=
    if has_cpu_torch "$env/bin/python"; then build=+cpu; fi
    run_announced pip install --no-config --python "$env/bin/python" --find-links wheelhouse \
        --constraint "$scratch/others.txt" --constraint "$scratch/torch.txt" \
        --editable . --group local "${dev[@]}" "torch==$torch_version$build"
}

dev=() torch=auto wanted_python='' env=.venv
usage="usage: ./scripts/setup.sh [--dev] [--torch auto|cpu|cuda|RELEASE|newest] [--python VERSION] [--env FOLDER]"
while (($#)); do
    case $1 in
        --dev) dev=(--group dev) ;;
        --torch) torch=${2-} && shift ;;
        --python) wanted_python=${2-} && shift ;;
        --env) env=${2-} && shift ;;
        *) die "unknown argument $1; $usage" ;;
    esac
    shift || die "the last argument needs a value; $usage"
done
[[ $torch =~ ^(auto|cpu|cuda|newest|[0-9]+(\.[0-9]+)+)$ ]] ||
    die "--torch needs auto, cpu, cuda, newest or a release such as 2.11, not '$torch'"
[[ $wanted_python =~ ^(3\.(1[1-9]|[2-9][0-9]))?$ ]] || die "--python needs 3.11 or later, not '$wanted_python'"
export UV_PROJECT_ENVIRONMENT=$env

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python=$(find_python)
find_uv
find_cache
honour_pip_settings
if is_release; then torch_version=$(resolve_torch); else torch_version=$(pinned_torch); fi
choose_torch
works "$env/bin/python" || "$uv" venv --quiet --clear --python "$python" "$env"
if is_release; then install_release; else install_locked; fi
# Bytecode that Python may not keep is made here, once: else each process of a node compiles torch anew, 2 s of a core.
# Only of what a node loads: all 21,000 files of the environment would take 45 s of a core or more.
if [[ -n ${UV_COMPILE_BYTECODE-}${PYTHONDONTWRITEBYTECODE-} ]]; then
    "$env/bin/python" -m compileall -q -j 0 src
    env -u PYTHONDONTWRITEBYTECODE "$env/bin/python" -c 'import zeroband.runtime.loop'
fi
installed=$("$env/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
say "$env is ready: $("$env/bin/python" --version), torch $installed"
if [[ $had_uv == false ]]; then say "uv came with it; once per shell: source $env/bin/activate"; fi
