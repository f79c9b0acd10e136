#!/usr/bin/env bash
# The same as simulate_multi_node.sh: which outer algorithm runs is said by the configuration.
#   ./scripts/simulate_multi_node_diloco.sh 2 2 src/zeroband/train.py @configs/debug/diloco.toml
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/simulate_multi_node.sh" "$@"
