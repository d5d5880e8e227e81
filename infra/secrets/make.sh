#!/bin/sh
# Makes the secrets that docker-compose.yml reads, each only where it is not there yet.
#
# Compose mounts these files as they are, and the containers run as other users than yours, so the files
# are readable by all and the folder by you alone: on this host nobody else gets past it.
set -eu
cd "$(dirname "$0")"
umask 022

secret() {
  [ -s "$1" ] || (
    # 256 bits as hexadecimal digits and a line's end.
    { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' && echo; } >"$1.tmp"
    mv "$1.tmp" "$1"
    echo "made infra/secrets/$1"
  )
}

chmod 0700 .
mkdir -p access
secret practicum_redis_password
secret practicum_database_password
secret practicum_grafana_password
# A folder, since its files are replaced when they change, which a mounted file would not follow.
secret access/services
[ -s access/callers.json ] || echo '{"tokens": []}' >access/callers.json
