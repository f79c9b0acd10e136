#!/usr/bin/env bash
# Several nodes of one run on this machine, with a Redis of their own:
#   ./scripts/simulate_multi_node.sh NODES RANKS SCRIPT CONFIG OVERRIDES...
#   ./scripts/simulate_multi_node.sh 2 2 src/zeroband/train.py @configs/debug/ddp.toml --train.micro_bs 4
#
# RANKS may name one number for each node: 2,1. A Redis that runs already: ZERO_BAND_STORE__URL=redis://HOST:6379; none,
# but a store in each node: ZERO_BAND_STORE__URL=nodes.
# Ctrl-C ends every process, a second one kills them. Exit code: the worst node's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ -x $root/.venv/bin/python ]] || "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m zeroband.cli simulate "$@"
