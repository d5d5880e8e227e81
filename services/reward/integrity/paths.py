"""The path policy: which of the policy's changes reach the clean room, and which count as tampering.

Pure functions over file lists. A change counts only where a glob of the grader's `editable` names it; all
else is restored from the pristine workspace. Files that steer Python or pytest rather than hold the
solution never count unless `editable` names them literally, and making one is tampering.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from practicum.errors import InvalidInput
from services.reward.sandbox.base import Changes, File

MAX_PATH_CHARS = 512
MAX_WORKSPACE_FILES = 2000
MAX_WORKSPACE_BYTES = 32 * 1024 * 1024

_STEERING_NAMES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"}
    | {"sitecustomize.py", "usercustomize.py"}
)
_MAYBE_STEERING_NAMES = frozenset({"pyproject.toml", "tox.ini", "setup.cfg"})
_STEERING_SUFFIXES = (".pth", ".dist-info", ".egg-info", ".egg-link", ".so", ".pyc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A candidate workspace, and what of the policy's changes did not get into it."""

    files: tuple[File, ...]
    evidence: tuple[str, ...]
    tampered: bool


def path_refusal(path: str) -> str:
    """Why a path may not be in a workspace; empty where it may."""
    if not path or len(path) > MAX_PATH_CHARS:
        return "is empty or too long"
    if "\0" in path or "\\" in path or path.startswith("/"):
        return "is not relative with forward slashes"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty, `.` or `..` part"
    if ".git" in (part.lower() for part in parts):
        return "is inside .git"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "is no UTF-8"
    return ""


def check_files(field: str, files: Sequence[File]) -> None:
    """Raises `InvalidInput` that names the file where a workspace may not be laid out."""
    seen: set[str] = set()
    for number, file in enumerate(files):
        refusal = path_refusal(file.path)
        if refusal:
            raise InvalidInput(f"{field}.files[{number}].path", f"{file.path!r} {refusal}")
        if file.path in seen:
            raise InvalidInput(f"{field}.files[{number}].path", f"{file.path!r} occurs twice")
        seen.add(file.path)
    for path in seen:
        inside = next((str(p) for p in PurePosixPath(path).parents if str(p) in seen), "")
        if inside:
            raise InvalidInput(f"{field}.files", f"{path!r} lies below the file {inside!r}")
    if len(files) > MAX_WORKSPACE_FILES:
        raise InvalidInput(f"{field}.files", f"{len(files)} files are above {MAX_WORKSPACE_FILES}")
    size_bytes = sum(len(file.content) for file in files)
    if size_bytes > MAX_WORKSPACE_BYTES:
        raise InvalidInput(f"{field}.files", f"{size_bytes} bytes are above {MAX_WORKSPACE_BYTES}")


def apply_changes(pristine: Sequence[File], changes: Changes, editable: Sequence[str]) -> Applied:
    """The pristine workspace with the changes that count."""
    files = {file.path: file for file in pristine}
    evidence = [f"{entry} (not applied)" for entry in changes.refused if not _is_bytecode(entry)]
    tampered = False
    for file in changes.changed:
        verdict = _refusal(file, editable)
        if verdict:
            evidence.append(f"{file.path}: {verdict} (not applied)")
            tampered = tampered or verdict.startswith("steers")
            continue
        blocking = _folder_conflict(file.path, files)
        if blocking:
            evidence.append(f"{file.path}: {blocking} is in its way (not applied)")
            continue
        files[file.path] = file
    for path in changes.removed:
        if path_refusal(path) or not is_editable(path, editable):
            evidence.append(f"{path}: removed, but not editable (restored)")
        else:
            files.pop(path, None)
    return Applied(files=tuple(files.values()), evidence=tuple(evidence), tampered=tampered)


def is_editable(path: str, editable: Sequence[str]) -> bool:
    """Whether a glob names the path; `*` also spans folders."""
    return any(fnmatchcase(path, glob) for glob in editable)


def _refusal(file: File, editable: Sequence[str]) -> str:
    refusal = path_refusal(file.path)
    if refusal:
        return f"the path {refusal}"
    if _steers(file) and file.path not in editable:
        return "steers Python or pytest"
    return "" if is_editable(file.path, editable) else "not editable"


def _steers(file: File) -> bool:
    parts = file.path.split("/")
    if any(part.endswith(_STEERING_SUFFIXES) for part in parts) or parts[-1] in _STEERING_NAMES:
        return True
    return parts[-1] in _MAYBE_STEERING_NAMES and b"pytest" in file.content


def _folder_conflict(path: str, files: dict[str, File]) -> str:
    above = next((str(parent) for parent in PurePosixPath(path).parents if str(parent) in files), "")
    return above or next((other for other in files if other.startswith(path + "/")), "")


def _is_bytecode(entry: str) -> bool:
    return entry.endswith(": bytecode")
