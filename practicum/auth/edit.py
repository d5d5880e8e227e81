"""Changing a tokens file, so that a service which reads it meanwhile sees the old one or the new one."""

import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from practicum.auth.entries import TokenEntry, dump_entries, parse_entries
from practicum.errors import Conflict, InvalidInput, NotFound

NEW_FILE_MODE = 0o600


def read_entries(path: Path) -> tuple[TokenEntry, ...]:
    """What a tokens file holds; nothing where there is none. `InvalidInput` where it cannot be used."""
    try:
        return parse_entries(path.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InvalidInput(str(path), str(error.strerror)) from None
    except ValueError as error:
        raise InvalidInput(str(path), str(error)) from None


def add_entry(path: Path, entry: TokenEntry) -> None:
    """Add an entry; `Conflict` where its name is taken. The file is made where there is none."""

    def added(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
        if any(other.name == entry.name for other in entries):
            raise Conflict(f"{path} has a token {entry.name!r} already; revoke it or take another name")
        return [*entries, entry]

    _change(path, added)


def remove_entry(path: Path, name: str) -> None:
    """Remove an entry; `NotFound` where there is none of this name."""

    def remaining(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            names = ", ".join(entry.name for entry in entries) or "none"
            raise NotFound(f"{path} has no token {name!r}; it has: {names}")
        return kept

    _change(path, remaining)


def _change(path: Path, change: Callable[[Sequence[TokenEntry]], Sequence[TokenEntry]]) -> None:
    path = path.resolve()  # a link stays a link
    try:
        # The folder is what is locked: the file itself is replaced.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidInput(str(path.parent), str(error.strerror)) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _replace(path, dump_entries(change(read_entries(path))))
        os.fsync(folder)
    except OSError as error:
        raise InvalidInput(str(path), str(error.strerror)) from None
    finally:
        os.close(folder)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, NEW_FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        _keep_owner(path, descriptor)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)


def _keep_owner(path: Path, descriptor: int) -> None:
    """Whoever could read the file before, a service under another user, still can."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(descriptor, found.st_uid, found.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
