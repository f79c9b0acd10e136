#!/usr/bin/env bash
# The documentation site, of the Markdown of this repository and the docstrings of the package, in build/docs:
#   ./scripts/docs.sh [FOLDER]
# Whatever Sphinx would warn of is an error. Nothing is fetched, neither here nor by the pages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
"$python" -c "import furo, myst_parser, sphinx" 2>/dev/null || ./scripts/setup.sh --dev
site=${1:-build/docs}
read_pages=$(mktemp -d)
trap 'rm -rf "$read_pages"' EXIT
"$python" -m sphinx -q -n -W --keep-going -c docs/site -d "$read_pages" . "$site"
echo "docs: $site/index.html"
