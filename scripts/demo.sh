#!/usr/bin/env bash
# Set up, then watch four nodes train a small model on this machine; one is killed and comes back: ./scripts/demo.sh
# Arguments override configs/demo.toml: ./scripts/demo.sh --data.source.paths 'my/texts/*.txt' --train.total_steps 1000
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m zeroband.cli demo "$@"
