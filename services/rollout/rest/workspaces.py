"""Workspaces as callers give them: files inline, or a tar archive. Nothing here touches a disk.

Refused, by name: absolute paths, parent references, links, devices, a path that is both a file and a folder,
and archives that grow past the bounds when they are unpacked.
"""

import base64
import binascii
import io
import tarfile
from collections.abc import Iterable
from pathlib import PurePosixPath

from services.rollout.rpc.taskspec import File

MAX_FILES = 10_000
MAX_WORKSPACE_BYTES = 64 * 1024 * 1024
_MAX_PATH_LENGTH = 1024


def check_path(path: str) -> str:
    """The path, normal and relative; `ValueError` says what is wrong with it."""
    if not path or len(path) > _MAX_PATH_LENGTH:
        raise ValueError(f"a path needs 1 to {_MAX_PATH_LENGTH} characters")
    if any(ord(character) < 32 or character in "\\\x7f" for character in path):
        raise ValueError(f"{path!r} holds a backslash or a control character")
    if path.startswith("/"):
        raise ValueError(f"{path!r} is absolute; give paths relative to the workspace")
    parts = path.split("/")
    if ".." in parts:
        raise ValueError(f"{path!r} refers to a parent folder")
    if "" in parts or "." in parts:
        raise ValueError(f"{path!r} is not normal; write it without '.' and empty parts")
    return path


def check_tree(paths: Iterable[str]) -> None:
    """`ValueError` where one path is a file and, for another, a folder."""
    files = set(paths)
    for path in files:
        for parent in PurePosixPath(path).parents:
            if str(parent) in files:
                raise ValueError(f"{str(parent)!r} is a file, and a folder of {path!r}")


def unpack_tar(tar_base64: str) -> tuple[File, ...]:
    """The regular files of a tar archive (plain or compressed); `ValueError` names what is refused."""
    try:
        packed = base64.b64decode(tar_base64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("is no base64") from error
    files: dict[str, File] = {}
    total_bytes = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:*") as archive:
            for member in archive:
                # `tar c .` writes "./a" and "."; both are plain.
                path = member.name.removeprefix("./")
                if member.isdir() and path in ("", "."):
                    continue
                check_path(path)
                if member.isdir():
                    continue
                if member.issym() or member.islnk():
                    raise ValueError(f"{path!r} is a link to {member.linkname!r}; links are not accepted")
                if not member.isreg():
                    raise ValueError(f"{path!r} is a device or another special file")
                total_bytes += member.size
                if len(files) >= MAX_FILES or total_bytes > MAX_WORKSPACE_BYTES:
                    raise ValueError(
                        f"the archive holds more than {MAX_FILES} files or {MAX_WORKSPACE_BYTES} bytes"
                    )
                if path in files:
                    raise ValueError(f"{path!r} occurs twice")
                stream = archive.extractfile(member)
                assert stream is not None
                files[path] = File(path=path, content=stream.read(), executable=bool(member.mode & 0o100))
    except (tarfile.TarError, EOFError, OSError, UnicodeError) as error:
        raise ValueError(f"is no readable tar archive: {error}") from error
    check_tree(files)
    return tuple(files.values())
