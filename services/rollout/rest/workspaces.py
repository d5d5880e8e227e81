"""Workspaces as callers give them: files inline, or a tar archive. Nothing here touches a disk.

Refused, by name: absolute paths, parent references, what lies in `.git`, links, devices, a path that is both
a file and a folder, text that is no text, and what is past the bounds, an archive before it is unpacked. The
bounds are the reward service's: it lays the files out.
"""

import base64
import binascii
import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from services.rollout.rpc.taskspec import File

MAX_FILES = 2000
MAX_WORKSPACE_BYTES = 32 * 1024 * 1024
MAX_PATH_LENGTH = 512


def check_storable(text: str) -> str:
    """The text, which every database can hold; `ValueError` says what is wrong with it."""
    if "\x00" in text:
        raise ValueError("holds the character U+0000")
    _encoded(text)
    return text


def check_path(path: str) -> str:
    """The path, normal and relative; `ValueError` says what is wrong with it."""
    if not path or len(path) > MAX_PATH_LENGTH:
        raise ValueError(f"a path needs 1 to {MAX_PATH_LENGTH} characters")
    _encoded(path)
    if any(ord(character) < 32 or character in "\\\x7f" for character in path):
        raise ValueError(f"{path!r} holds a backslash or a control character")
    if path.startswith("/"):
        raise ValueError(f"{path!r} is absolute; give paths relative to the workspace")
    parts = path.split("/")
    if ".." in parts:
        raise ValueError(f"{path!r} refers to a parent folder")
    if "" in parts or "." in parts:
        raise ValueError(f"{path!r} is not normal; write it without '.' and empty parts")
    if ".git" in (part.lower() for part in parts):
        raise ValueError(f"{path!r} is inside .git")
    return path


def check_files(files: Mapping[str, str]) -> None:
    """`ValueError` where these files, text by path, may not be laid out."""
    if len(files) > MAX_FILES:
        raise ValueError(f"holds {len(files)} files; at most {MAX_FILES} are accepted")
    size_bytes = 0
    for path, text in files.items():
        check_path(path)
        try:
            size_bytes += len(_encoded(text))
        except ValueError as error:
            raise ValueError(f"{path!r} {error}") from error
    if size_bytes > MAX_WORKSPACE_BYTES:
        raise ValueError(f"holds {size_bytes} bytes; at most {MAX_WORKSPACE_BYTES} are accepted")
    check_tree(files)


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


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half a character (a lone surrogate)") from error
