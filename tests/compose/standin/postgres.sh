#!/bin/sh
# As the official image does: the first start makes the database, then the server runs in the foreground.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  # Split on purpose: the variable holds several arguments.
  # shellcheck disable=SC2086
  initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --encoding=UTF8 --locale=C.UTF-8 \
    ${POSTGRES_INITDB_ARGS:-}
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  pg_ctl --wait --options="-c listen_addresses=''" start
  PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE") createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl --wait stop
fi
exec "$@" -c listen_addresses='*'
