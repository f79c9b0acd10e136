#!/usr/bin/env bash
# Write requirements.lock anew, after a change of dependencies in pyproject.toml: ./scripts/lock.sh
#
# Newer releases than `exclude-newer` in pyproject.toml are not seen: move that date to take them, to one that is nine days
# old at least: mirrors show a release days after its upload, and then two machines would resolve to different ones.
# It resolves in a copy without wheelhouse/ and without settings of this machine, so that only the registry's files are named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
PATH=$PATH:$root/.venv/bin
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

mkdir -p "$copy/wheelhouse" "$copy/src/zeroband"
cp pyproject.toml README.md LICENSE "$copy"
cp src/zeroband/__init__.py "$copy/src/zeroband"
cd "$copy"
env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL uv lock --quiet
{
    echo "# Everything the package, its extras and its groups need, for every platform. Written by scripts/lock.sh."
    echo "# inputs: sha256:$(PYTHONPATH=$root/scripts python3 -c \
        'import sys, check_lock, pathlib; print(check_lock.inputs_digest(pathlib.Path(sys.argv[1])))' pyproject.toml)"
    uv export --quiet --frozen --all-groups --all-extras --no-emit-project --no-header --no-annotate
} >requirements.lock
mv requirements.lock "$root/requirements.lock"
