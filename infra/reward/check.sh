#!/bin/sh
# The reward container's health check. An engine runs it as the user that the container starts with, so it
# gives up root and every capability before it reads what the service answers.
set -eu
if [ "$(id -u)" = 0 ]; then
  exec setpriv --reuid practicum --regid practicum --init-groups --bounding-set=-all --inh-caps=-all \
    --ambient-caps=-all --no-new-privs "$0"
fi
exec python -I -c "from http.client import HTTPConnection as C
c = C('127.0.0.1', 8000, timeout=4)
c.request('GET', '/healthz')
raise SystemExit(c.getresponse().status != 200)"
