"""The manifest of a checkpoint folder: what is in it, with a hash for every file and every tensor.

Owns `manifest.json`, which is written last into the folder; a folder without one is not a
checkpoint. Reads tensors' bytes by their offsets, so it needs neither torch nor safetensors and a
reader in any language can check them the same way: the hash is SHA-256 over a tensor's bytes as they
lie in the file (little-endian, row-major).
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from practicum.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = "practicum.checkpoint.v1"

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file, by its path relative to the folder, with forward slashes."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the Hugging Face weights."""

    name: str
    file: str
    dtype: str  # as safetensors names it, for example "F32"
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint folder holds."""

    run_id: str
    weight_version: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, the manifest aside."""
        return sum(entry.size_bytes for entry in self.files)

    def to_bytes(self) -> bytes:
        """The text of `manifest.json`, the same bytes for the same content."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def build_manifest(folder: Path, *, run_id: str, weight_version: int) -> Manifest:
    """Hash every file below `folder`, and every tensor of the weights at its top.

    Raises `CheckpointError` where a weights file cannot be read as safetensors.
    """
    files = []
    tensors: list[TensorEntry] = []
    for path in _files_below(folder):
        name = path.relative_to(folder).as_posix()
        files.append(FileEntry(path=name, size_bytes=path.stat().st_size, sha256=file_sha256(path)))
        if path.parent == folder and path.suffix == ".safetensors":
            tensors.extend(_tensors_of(path))
    tensors.sort(key=lambda entry: entry.name)
    return Manifest(run_id=run_id, weight_version=weight_version, files=tuple(files), tensors=tuple(tensors))


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write `manifest.json`; its SHA-256, hex."""
    content = manifest.to_bytes()
    (folder / MANIFEST_NAME).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """A folder's manifest and its SHA-256; `CheckpointError` where there is none that can be read."""
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
        body = json.loads(content)
        if body.get("format") != FORMAT:
            raise CheckpointError(f"{folder}: the manifest's format is {body.get('format')!r}, not {FORMAT}")
        manifest = Manifest(
            run_id=body["run_id"],
            weight_version=body["weight_version"],
            files=tuple(FileEntry(**entry) for entry in body["files"]),
            tensors=tuple(
                TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in body["tensors"]
            ),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}: no readable manifest: {error}") from error
    return manifest, hashlib.sha256(content).hexdigest()


def verify_folder(folder: Path, *, manifest_sha256: str) -> Manifest:
    """Raise `CheckpointError`, naming the file, where the folder is not what its manifest says."""
    manifest, found_sha256 = read_manifest(folder)
    if found_sha256 != manifest_sha256:
        raise CheckpointError(f"{folder}: the manifest changed after the checkpoint was committed")
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            raise CheckpointError(f"{folder}: {entry.path} is missing")
        if path.stat().st_size != entry.size_bytes or file_sha256(path) != entry.sha256:
            raise CheckpointError(f"{folder}: {entry.path} is not what the manifest says")
    return manifest


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root) / name
            if path != folder / MANIFEST_NAME:
                yield path


def _tensors_of(path: Path) -> Iterator[TensorEntry]:
    with path.open("rb") as file:
        try:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        except (ValueError, MemoryError, OverflowError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
        first_byte = 8 + header_bytes
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, end = entry["data_offsets"]
                yield TensorEntry(
                    name=name,
                    file=path.name,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    sha256=_span_sha256(view, first_byte + start, first_byte + end),
                )


def _span_sha256(view: memoryview, start: int, end: int) -> str:
    digest = hashlib.sha256()
    for position in range(start, end, _READ_BYTES):
        digest.update(view[position : min(position + _READ_BYTES, end)])
    return digest.hexdigest()
