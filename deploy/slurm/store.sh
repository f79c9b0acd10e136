#!/bin/bash
# The Redis that nodes meet at, in the foreground: on a login node, or wherever all nodes reach it. Keeps nothing on disk.
#   deploy/slurm/store.sh HOST [PORT]
# Writes ~/.zeroband/token (once) and ~/.zeroband/store.url, both with mode 600, for jobs to read; ZEROBAND_SECRETS names
# another folder, which the nodes must see. No secret stands on a command line: Redis reads its own from standard input.
set -euo pipefail
umask 077
host=${1:?the address under which nodes reach this machine}
port=${2:-6379}
secrets=${ZEROBAND_SECRETS:-$HOME/.zeroband}
mkdir -p "$secrets"
[[ -s $secrets/token ]] || openssl rand -hex 32 >"$secrets/token"
password=$(sha256sum <"$secrets/token" | cut -c-64) # not the token itself, which the store shall not know
echo "redis://:$password@$host:$port" >"$secrets/store.url"

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
redis=$(.venv/bin/python -c 'from zeroband.elastic.store.local_server import find_redis_server as find; print(find())')
exec "$redis" - <<END
bind ${STORE_BIND:-*}
port $port
requirepass $password
save ""
appendonly no
END
