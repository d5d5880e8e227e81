"""Checkpoint folders: whole or not at all, whatever happens in the middle."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from practicum.errors import CheckpointError
from services.trainer.checkpoints.folders import CheckpointFolders, copy_model, versions_to_retire
from services.trainer.checkpoints.manifest import MANIFEST_NAME, read_manifest, verify_folder

WEIGHTS: dict[str, NDArray[Any]] = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.array([1, 2], dtype=np.float16),
}


def fill(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    (folder / "state").mkdir()
    (folder / "state" / "optimizer.bin").write_bytes(b"moments")


@pytest.fixture
def folders(tmp_path: Path) -> CheckpointFolders:
    return CheckpointFolders(tmp_path, "run_1")


def names(folders: CheckpointFolders) -> list[str]:
    return sorted(path.name for path in folders.folder_of(0).parent.iterdir())


def test_write_when_done_names_every_file_and_tensor_by_its_hash(folders: CheckpointFolders) -> None:
    written = folders.write(3, fill)
    assert written.folder.name == "v000003"
    assert names(folders) == ["v000003"]
    text = (written.folder / MANIFEST_NAME).read_bytes()
    assert hashlib.sha256(text).hexdigest() == written.manifest_sha256
    body = json.loads(text)
    assert [entry["path"] for entry in body["files"]] == [
        "config.json",
        "model.safetensors",
        "state/optimizer.bin",
    ]
    by_name = {entry["name"]: entry for entry in body["tensors"]}
    assert list(by_name) == ["a.weight", "b.bias"]
    for name, value in load_file(written.folder / "model.safetensors").items():
        assert by_name[name]["sha256"] == hashlib.sha256(value.tobytes()).hexdigest()
        assert by_name[name]["shape"] == list(value.shape)
    assert (by_name["a.weight"]["dtype"], by_name["b.bias"]["dtype"]) == ("F32", "F16")
    verify_folder(written.folder, manifest_sha256=written.manifest_sha256)


@pytest.mark.parametrize("name", ["model.safetensors", "state/optimizer.bin", MANIFEST_NAME])
def test_verify_when_one_byte_changed_says_so(folders: CheckpointFolders, name: str) -> None:
    written = folders.write(1, fill)
    path = written.folder / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError):
        verify_folder(written.folder, manifest_sha256=written.manifest_sha256)


def test_verify_when_a_file_is_gone_names_it(folders: CheckpointFolders) -> None:
    written = folders.write(1, fill)
    (written.folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json is missing"):
        verify_folder(written.folder, manifest_sha256=written.manifest_sha256)


def test_write_when_the_filling_fails_leaves_nothing_and_keeps_the_others(folders: CheckpointFolders) -> None:
    before = folders.write(1, fill)

    def break_off(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("the device is lost")

    with pytest.raises(CheckpointError, match="the device is lost"):
        folders.write(2, break_off)
    assert names(folders) == ["v000001"]
    verify_folder(before.folder, manifest_sha256=before.manifest_sha256)
    assert folders.write(2, fill).folder.is_dir()


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """A disk that takes no more, as far as this process sees: writes past the limit fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_F14_write_when_the_disk_is_full_reports_and_works_after_space_is_freed(
    folders: CheckpointFolders,
) -> None:
    before = folders.write(1, fill)

    def fill_five(folder: Path) -> None:
        for number in range(5):
            (folder / f"{number}.bin").write_bytes(b"x" * (100 if number < 3 else 100_000))

    with largest_file(4096), pytest.raises(CheckpointError, match="version 2 cannot be written"):
        folders.write(2, fill_five)
    assert names(folders) == ["v000001"]
    verify_folder(before.folder, manifest_sha256=before.manifest_sha256)
    assert folders.write(2, fill_five).size_bytes == 200_300


def test_F14_write_when_the_same_folder_is_complete_already_accepts_it(folders: CheckpointFolders) -> None:
    first = folders.write(1, fill)
    inode = (first.folder / "config.json").stat().st_ino
    again = folders.write(1, fill)
    assert again == first
    assert (first.folder / "config.json").stat().st_ino == inode


def test_write_when_another_folder_has_the_name_replaces_it(folders: CheckpointFolders) -> None:
    def fill_another(folder: Path) -> None:
        (folder / "other.txt").write_text("x")

    first = folders.write(1, fill)
    second = folders.write(1, fill_another)
    assert second.manifest_sha256 != first.manifest_sha256
    assert names(folders) == ["v000001"]
    verify_folder(second.folder, manifest_sha256=second.manifest_sha256)


def test_F13_recover_when_killed_halfway_finds_the_previous_one_and_removes_the_rest(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path, "run_1")
    kept = folders.write(1, fill)
    program = """
import os, sys, signal
from pathlib import Path
from services.trainer.checkpoints.folders import CheckpointFolders
def fill(folder):
    for number in range(4):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"{number}.bin").write_bytes(b"x" * 1000)
CheckpointFolders(Path(sys.argv[1]), "run_1").write(2, fill)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert names(folders) == [".v000002.draft", "v000001"]
    assert folders.recover([1]) == [".v000002.draft"]
    assert names(folders) == ["v000001"]
    verify_folder(kept.folder, manifest_sha256=kept.manifest_sha256)


def test_recover_when_a_complete_folder_was_never_committed_removes_it(folders: CheckpointFolders) -> None:
    folders.write(1, fill)
    folders.write(2, fill)
    assert folders.recover([1]) == ["v000002"]


def test_recover_when_a_committed_folder_is_gone_says_which(folders: CheckpointFolders) -> None:
    folders.write(1, fill)
    with pytest.raises(CheckpointError, match="v000002 is gone"):
        folders.recover([1, 2])


def test_link_when_nothing_was_trained_shares_the_bytes_under_another_version(
    folders: CheckpointFolders,
) -> None:
    first = folders.write(1, fill)
    second = folders.link(2, 1)
    assert os.path.samefile(first.folder / "model.safetensors", second.folder / "model.safetensors")
    manifest, _ = read_manifest(second.folder)
    assert manifest.weight_version == 2
    folders.remove(1)
    verify_folder(second.folder, manifest_sha256=second.manifest_sha256)


def test_copy_model_when_the_source_changes_later_keeps_its_own_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("one")
    (source / ".cache").write_text("hidden")
    (source / "nested").mkdir()
    copy_model(source, tmp_path / "copy")
    (source / "config.json").write_text("two")
    assert {path.name: path.read_text() for path in (tmp_path / "copy").iterdir()} == {"config.json": "one"}


@pytest.mark.parametrize(
    ("committed", "keep_last", "protected", "doomed"),
    [
        ([0, 1, 2, 3], 2, [], [0, 1]),
        ([0, 1, 2, 3], 2, [0], [1]),
        ([0, 1], 3, [], []),
        ([4, 2, 3], 1, [9], [2, 3]),
    ],
)
def test_versions_to_retire_when_asked_keeps_the_newest_and_those_in_use(
    committed: list[int], keep_last: int, protected: list[int], doomed: list[int]
) -> None:
    assert versions_to_retire(committed, keep_last=keep_last, protected=protected) == doomed
