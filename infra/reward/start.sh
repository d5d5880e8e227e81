#!/bin/sh
# Starts the reward service as the user `practicum`.
#
# A sandbox mounts a /proc of its own. The kernel allows that only beside a /proc that nothing covers, and
# container engines cover parts of theirs. Started as root with CAP_SYS_ADMIN, this script mounts one more
# proc of this container, in a folder that only root may enter, and then gives up root and every capability
# for good, before any of our code or of anyone's input runs. Started as another user, it only starts the
# service, which then needs a /proc without covers (see docs/deploy.md).
set -eu
if [ "$(id -u)" = 0 ]; then
  mount -t proc -o nosuid,nodev,noexec proc /run/sandbox/proc || {
    echo "the reward container needs CAP_SYS_ADMIN while it starts, and an AppArmor profile that lets it" \
      "mount: docker-compose.yml has both; or start it as user 10001 with systempaths=unconfined" >&2
    exit 1
  }
  exec setpriv --reuid practicum --regid practicum --init-groups --bounding-set=-all --inh-caps=-all \
    --ambient-caps=-all --no-new-privs "$0" "$@"
fi
exec python -m services.reward.main "$@"
