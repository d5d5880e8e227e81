"""File access inside a session's workspace, for the file tools and the snapshot.

Every path is resolved by the kernel beneath the workspace (`openat2`), so that a link planted by the policy
leads nowhere. Only regular files are read or written; opening never blocks. Errors are `FileRefused` with
text for the policy.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from typing import Any

from . import kernel

WORK = "/work"
MAX_FILES = 4096
MAX_REFUSED = 200
MAX_SNAPSHOT_BYTES = 32 * 1024 * 1024


class FileRefused(Exception):
    """A file operation that was refused or failed; the message is shown to the policy."""


class WorkFolder:
    """The workspace folder, held open; the digests of its pristine files tell what changed."""

    def __init__(self, max_file_bytes: int) -> None:
        self._fd = os.open(WORK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._max_file_bytes = max_file_bytes
        self._pristine: dict[str, tuple[str, bool]] = {}

    def lay_out(self, path: str, content: bytes, executable: bool, *, pristine: bool) -> None:
        """Writes one file of the task; `pristine` ones are the base that `snapshot` compares with."""
        self.write(path, content, executable=executable)
        if pristine:
            self._pristine[path] = (hashlib.sha256(content).hexdigest(), executable)

    def read(self, path: str) -> bytes:
        """The bytes of a regular file."""
        relative = self._relative(path)
        fd = self._open(relative, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            size_bytes = self._regular_size(fd, relative)
            if size_bytes > self._max_file_bytes:
                raise FileRefused(f"{relative} has {size_bytes} bytes, above the limit")
            return file.read(self._max_file_bytes)

    def write(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Creates or replaces a regular file, and the folders on its way."""
        relative = self._relative(path)
        if len(content) > self._max_file_bytes:
            raise FileRefused(f"{relative}: {len(content)} bytes are above the limit of a file")
        parents = relative.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            self._make_folder("/".join(parents[:depth]))
        fd = self._open(relative, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            self._regular_size(fd, relative)
            os.ftruncate(fd, 0)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            if executable:
                os.fchmod(fd, 0o755)
        except OSError as error:
            raise FileRefused(f"{relative}: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(fd)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replaces the only occurrence of `old`."""
        relative = self._relative(path)
        content = self.read(path)
        num_found = content.count(old.encode())
        if num_found == 0:
            raise FileRefused(f"old text not found in {relative}")
        if num_found > 1:
            raise FileRefused(f"old text occurs {num_found} times in {relative}")
        self.write(path, content.replace(old.encode(), new.encode()))

    def paths(self) -> list[str]:
        """Every regular file, sorted."""
        return sorted(path for path, status in self.walk() if stat.S_ISREG(status.st_mode))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Everything that is no folder, with its status; links are not followed.

        Raises `FileRefused` where there is too much of it, or too deep.
        """
        try:
            yield from self._walk()
        except (OSError, RecursionError) as error:
            raise FileRefused(f"the folders cannot be listed ({type(error).__name__})") from error

    def _walk(self) -> Iterator[tuple[str, os.stat_result]]:
        num_seen = 0
        for folder, folders, names, folder_fd in os.fwalk(".", dir_fd=self._fd, follow_symlinks=False):
            links = [name for name in folders if _is_link(name, folder_fd)]
            for name in [*names, *links]:
                num_seen += 1
                if num_seen > MAX_FILES:
                    raise FileRefused(f"the workspace holds more than {MAX_FILES} files")
                path = os.path.normpath(os.path.join(folder, name))
                try:
                    yield path, os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                except OSError:  # gone meanwhile
                    continue

    def snapshot(self) -> dict[str, Any]:
        """What differs from the pristine files: `changed` (path, bytes, executable), `removed`, `refused`."""
        changed: list[tuple[str, bytes, bool]] = []
        refused: list[str] = []
        removed: list[str] = []
        total_bytes = 0
        for path, status in self._pristine_then_others(removed, refused):
            reason = self._refusal(path, status)
            if reason:
                refused.append(f"{_shown(path)}: {reason}")
                continue
            executable = bool(status.st_mode & stat.S_IXUSR)
            try:
                content = self.read(path)
            except FileRefused as error:
                refused.append(str(error))
                continue
            if self._pristine.get(path) == (hashlib.sha256(content).hexdigest(), executable):
                continue
            total_bytes += len(content)
            if total_bytes > MAX_SNAPSHOT_BYTES:
                refused.append(f"{_shown(path)}: the changes are above {MAX_SNAPSHOT_BYTES} bytes")
                continue
            changed.append((path, content, executable))
        return {"changed": changed, "removed": sorted(removed), "refused": refused[:MAX_REFUSED]}

    def _pristine_then_others(
        self, removed: list[str], refused: list[str]
    ) -> Iterator[tuple[str, os.stat_result]]:
        """The task's own files first, so that a flood of new ones cannot hide what became of them."""
        for path in self._pristine:
            try:
                yield path, os.stat(path, dir_fd=self._fd, follow_symlinks=False)
            except OSError:
                removed.append(path)
        try:
            for path, status in self.walk():
                if path not in self._pristine:
                    yield path, status
        except FileRefused as error:
            refused.append(str(error))

    def _refusal(self, path: str, status: os.stat_result) -> str:
        if path.startswith("__pycache__/") or "/__pycache__/" in path:
            return "bytecode"
        if stat.S_ISLNK(status.st_mode):
            return "a link"
        if not stat.S_ISREG(status.st_mode):
            return "no regular file"
        if status.st_size > self._max_file_bytes:
            return f"{status.st_size} bytes are above the limit of a file"
        if not _is_text(path):
            return "the name is no UTF-8"
        return ""

    def _relative(self, path: str) -> str:
        if path.startswith(WORK + "/"):
            path = path[len(WORK) + 1 :]
        if not path or "\0" in path or path.startswith("/"):
            raise FileRefused(f"{_shown(path) or 'the empty path'} is not a path inside the workspace")
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise FileRefused(f"{_shown(path)} is not a plain path inside the workspace")
        return path

    def _open(self, relative: str, flags: int, mode: int = 0) -> int:
        try:
            return kernel.open_beneath(self._fd, relative, flags, mode)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise FileRefused(f"no such file: {_shown(relative)}") from error
            if error.errno in (errno.EXDEV, errno.ELOOP):
                raise FileRefused(f"{_shown(relative)} leads out of the workspace") from error
            raise FileRefused(f"{_shown(relative)}: {os.strerror(error.errno or 0)}") from error

    def _make_folder(self, relative: str) -> None:
        head, _, name = relative.rpartition("/")
        parent = self._open(head, os.O_PATH | os.O_DIRECTORY) if head else os.dup(self._fd)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            pass
        except OSError as error:
            raise FileRefused(f"{_shown(relative)}: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(parent)

    def _regular_size(self, fd: int, relative: str) -> int:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FileRefused(f"{_shown(relative)} is no regular file")
        return status.st_size


def _is_link(name: str, folder_fd: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(path: str) -> str:
    return path.encode("utf-8", "backslashreplace").decode()
