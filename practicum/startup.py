"""What every service's `main` does before it serves: settings, logs, and the schema of its database.

    python -m services.rollout.main            serve until a signal
    python -m services.rollout.main migrate    bring this service's schema up to date, and end

A reason not to start is one message on standard error and the status 1, without a traceback. A signal to
stop that comes before the service serves ends it with 0: there is nothing to drain.
"""

import argparse
import signal
from collections.abc import Sequence
from typing import TypeVar

from practicum.db.migrate import SchemaError, require_current, upgrade, wait_until_up
from practicum.settings import ServiceSettings, read_settings
from practicum.telemetry.logs import configure_logs, get_logger

S = TypeVar("S", bound=ServiceSettings)

log = get_logger("practicum.startup")


def start(name: str, settings_type: type[S], *, migrations: str, arguments: Sequence[str] | None = None) -> S:
    """The settings to serve with, once the schema is current.

    `arguments` are those of the command line where None. Raises `SystemExit`: with 0 after `migrate`, and
    with the reason where the service cannot start.
    """
    command = f"python -m services.{name}.main"
    parser = argparse.ArgumentParser(prog=command)
    parser.add_argument("do", nargs="?", choices=("serve", "migrate"), default="serve")
    do = parser.parse_args(arguments).do
    # The first process of a container gets no signal that it does not handle.
    signal.signal(signal.SIGTERM, _leave)
    try:
        settings = read_settings(settings_type)
        configure_logs(name, settings.log_level)
        url = settings.database_url
        wait_until_up(url, patience_s=settings.database_patience_s)
        if do == "migrate" or settings.migrate_at_start:
            upgrade(url, migrations)
            log.info("schema.current", name=name)
        else:
            require_current(url, migrations, hint=f"run `{command} migrate` first")
    except (ValueError, SchemaError) as error:
        raise SystemExit(f"the {name} service does not start: {error}") from None
    if do == "migrate":
        raise SystemExit(0)
    return settings


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)
