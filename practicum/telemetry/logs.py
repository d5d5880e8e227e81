"""Structured logs: one JSON object a line on standard error, with the service's name.

Ids belong here and on spans, never into metric labels. `configure_logs` is called by a process's
`main` once; everything else asks for a logger.
"""

import logging
import sys
from typing import cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer


def configure_logs(service: str, level: str) -> None:
    """Send every log line of this process to standard error as JSON."""
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            # Without the frames' locals: they hold tokens, headers and hidden tests.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose lines carry `room=name`."""
    return cast(structlog.stdlib.BoundLogger, structlog.get_logger(room=name))
