"""A small file that is read again when it changed.

It is looked at when it is used, so there is no watcher to start or stop. An edit that cannot be used
is logged as an error, once, and the last good content stays: a slip of an editor locks nobody out.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from practicum.clock import Clock
from practicum.telemetry.logs import get_logger

log = get_logger("practicum.auth")

MAX_FILE_BYTES = 1024 * 1024
# Two writes within one tick of a file system's clock look alike; a file this young is read again.
SETTLED_AFTER_S = 2.0

T = TypeVar("T")
_Stamp = tuple[int, int, int, int]


class WatchedFile(Generic[T]):
    """The parsed content of `path`, as new as the file. `parse` raises `ValueError` for what is no use."""

    def __init__(self, path: Path, parse: Callable[[bytes], T], clock: Clock) -> None:
        """Raises `ValueError`, which names the file, where it cannot be read or used at first."""
        self._path, self._parse, self._clock = path, parse, clock
        self._stamp: _Stamp | None = None  # None = read it at the next use
        self._complaint = ""
        try:
            self._value = parse(self._read())
        except (OSError, ValueError) as error:
            raise ValueError(_text(path, error)) from None

    def get(self) -> T:
        """What the file says now, or said last when it made sense."""
        try:
            if self._stamp is None or _stamp_of(os.stat(self._path)) != self._stamp:
                value = self._parse(self._read())
                if value != self._value or self._complaint:
                    self._value, self._complaint = value, ""
                    log.info("auth.file_read", path=str(self._path))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                self._stamp = None
            text = _text(self._path, error)
            if text != self._complaint:
                self._complaint = text
                log.error("auth.file_refused", error=text, kept="what the file said before")
        return self._value

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
        is_settled = self._clock.now().timestamp() - found.st_mtime > SETTLED_AFTER_S
        self._stamp = _stamp_of(found) if is_settled else None
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"holds over {MAX_FILE_BYTES} bytes")
        return content


def _stamp_of(found: os.stat_result) -> _Stamp:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _text(path: Path, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"{path}: is no UTF-8"  # its own text would show what the file holds
    return f"{path}: {error.strerror if isinstance(error, OSError) else error}"
