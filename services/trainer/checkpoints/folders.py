"""The checkpoint folders of one run, and the one way a folder comes to be and goes away.

Layout: `{root}/{run_id}/v{weight_version:06d}` holds a Hugging Face folder, `state/` with what the
optimizer needs, and `manifest.json`. A folder is written under a name that starts with a dot, each
file and folder is synced to disk, and one rename gives it its name: a reader sees all of it or none.

A folder with its final name is complete, but only SQL says that it is committed; `recover` removes
every other one. Blocking: call it from the training thread.
"""

import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import CheckpointError
from services.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    build_manifest,
    read_manifest,
    write_manifest,
)

STATE_FOLDER = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """A complete folder that SQL may commit."""

    weight_version: int
    folder: Path
    manifest_sha256: str
    size_bytes: int


class CheckpointFolders:
    """The folders of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self._run_id = run_id
        self._home = (root / run_id).absolute()

    def folder_of(self, weight_version: int) -> Path:
        """Where a version lies, or would lie."""
        return self._home / f"v{weight_version:06d}"

    def write(self, weight_version: int, fill: Callable[[Path], None]) -> WrittenCheckpoint:
        """Make a version's folder from what `fill` writes into the empty folder it is given.

        Raises `CheckpointError` where it cannot be written (a full disk, say); nothing is left behind
        then and every other folder is as it was.
        """
        draft = self._home / f".v{weight_version:06d}.draft"
        try:
            _remove_tree(draft)
            draft.mkdir(parents=True)
            fill(draft)
            # The disk takes the files while they are hashed: either alone would take half the time of both.
            with ThreadPoolExecutor(max_workers=1) as disk:
                synced = disk.submit(_sync_tree, draft)
                manifest = build_manifest(draft, run_id=self._run_id, weight_version=weight_version)
                synced.result()
            manifest_sha256 = write_manifest(draft, manifest)
            _sync_file(draft / MANIFEST_NAME)
            _sync_folder(draft)
            self._give_name(draft, weight_version, manifest_sha256)
        except (OSError, CheckpointError, RuntimeError) as error:
            # The writers below report a full disk as OSError or as RuntimeError, as they please.
            _remove_tree(draft)
            raise CheckpointError(f"version {weight_version} cannot be written: {error}") from error
        return WrittenCheckpoint(
            weight_version=weight_version,
            folder=self.folder_of(weight_version),
            manifest_sha256=manifest_sha256,
            size_bytes=manifest.size_bytes,
        )

    def _give_name(self, draft: Path, weight_version: int, manifest_sha256: str) -> None:
        target = self.folder_of(weight_version)
        if target.exists():
            # An earlier try was renamed but never committed. The same bytes are the same checkpoint.
            if _manifest_sha256_of(target) == manifest_sha256:
                _remove_tree(draft)
                return
            _remove_tree(target)
        draft.rename(target)
        _sync_folder(self._home)

    def link(self, weight_version: int, source_version: int) -> WrittenCheckpoint:
        """A version with the same content as another: hard links, and a manifest of its own."""
        source = self.folder_of(source_version)

        def fill(draft: Path) -> None:
            shutil.copytree(
                source,
                draft,
                copy_function=os.link,
                dirs_exist_ok=True,
                ignore=lambda _folder, names: [MANIFEST_NAME] if MANIFEST_NAME in names else [],
            )

        return self.write(weight_version, fill)

    def recover(self, committed_versions: Collection[int]) -> list[str]:
        """Remove drafts and folders that SQL does not name; the names removed.

        Raises `CheckpointError` where a committed folder is gone.
        """
        wanted = {self.folder_of(version).name for version in committed_versions}
        present = {path.name for path in self._home.iterdir()} if self._home.is_dir() else set()
        for name in sorted(wanted - present):
            raise CheckpointError(f"the committed checkpoint {self._home / name} is gone")
        leftovers = sorted(present - wanted)
        for name in leftovers:
            _remove_tree(self._home / name)
        return leftovers

    def remove(self, weight_version: int) -> None:
        """Remove a version's folder; one that is not there is no error."""
        target = self.folder_of(weight_version)
        if target.exists():
            # Renamed first: a crash in between leaves a draft, never half a checkpoint with a name.
            doomed = self._home / f".{target.name}.retired"
            _remove_tree(doomed)
            target.rename(doomed)
            _remove_tree(doomed)


def copy_model(source: Path, folder: Path) -> None:
    """Copy the files of a Hugging Face model folder; folders in it and hidden files stay behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.name != MANIFEST_NAME:
            shutil.copyfile(path, folder / path.name)


def versions_to_retire(
    committed: Collection[int], *, keep_last: int, protected: Collection[int]
) -> list[int]:
    """Committed versions that may go: all but the last `keep_last` and those in use."""
    newest = set(sorted(committed)[-keep_last:]) if keep_last > 0 else set()
    return sorted(set(committed) - newest - set(protected))


def _manifest_sha256_of(folder: Path) -> str:
    try:
        return read_manifest(folder)[1]
    except CheckpointError:
        return ""


def _remove_tree(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _sync_file(Path(root) / name)
        _sync_folder(Path(root))


def _sync_file(path: Path) -> None:
    # Opened for writing where allowed: some file systems refuse to sync a read-only descriptor.
    descriptor = os.open(path, os.O_RDWR)
    try:
        # Some writers keep their files to themselves, but an engine may run as another user.
        os.fchmod(descriptor, 0o644)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
