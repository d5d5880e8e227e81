"""The path policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import InvalidInput
from services.reward.integrity.paths import apply_changes, check_files, is_editable, path_refusal
from services.reward.sandbox.base import Changes
from tests.fixtures.reward import changed, files

PRISTINE = files({"calc.py": "1", "test_calc.py": "2", "pkg/mod.py": "3"})


def contents(changes: Changes, editable: tuple[str, ...]) -> dict[str, bytes]:
    return {file.path: file.content for file in apply_changes(PRISTINE, changes, editable).files}


def test_only_editable_changes_count() -> None:
    changes = changed({"calc.py": "new", "test_calc.py": "weak", "other.py": "x"}, removed=("pkg/mod.py",))
    applied = apply_changes(PRISTINE, changes, ("calc.py",))
    assert contents(changes, ("calc.py",)) == {"calc.py": b"new", "test_calc.py": b"2", "pkg/mod.py": b"3"}
    assert [line.split(":")[0] for line in applied.evidence] == ["test_calc.py", "other.py", "pkg/mod.py"]
    assert not applied.tampered


def test_an_editable_file_can_be_removed() -> None:
    assert contents(changed({}, removed=("pkg/mod.py",)), ("pkg/*",)).keys() == {"calc.py", "test_calc.py"}


def test_an_empty_diff_is_no_change() -> None:
    applied = apply_changes(PRISTINE, Changes(), ("*",))
    assert applied.files == PRISTINE
    assert applied.evidence == ()


@pytest.mark.parametrize(
    ("path", "content", "steers"),
    [
        ("conftest.py", "", True),
        ("pkg/conftest.py", "", True),
        ("sitecustomize.py", "", True),
        ("x.pth", "", True),
        ("x-1.dist-info/RECORD", "", True),
        ("calc.so", "", True),
        ("pyproject.toml", "[tool.pytest.ini_options]", True),
        ("pyproject.toml", "[project]", False),
        ("setup.cfg", "[tool:pytest]", True),
        ("new.py", "", False),
    ],
)
def test_files_that_steer_the_tests_are_tampering(path: str, content: str, steers: bool) -> None:
    applied = apply_changes(PRISTINE, changed({path: content}), ("*",))
    assert applied.tampered is steers
    assert (path in {file.path for file in applied.files}) is not steers


def test_a_steering_file_that_the_task_names_counts() -> None:
    applied = apply_changes(PRISTINE, changed({"conftest.py": "x"}), ("conftest.py",))
    assert not applied.tampered
    assert applied.evidence == ()


@pytest.mark.parametrize(
    "path",
    ["", "/etc/x", "a/../b", "../b", "./a", "a//b", "a/", ".git/config", "a/.GIT/x", "a\\b", "a\0", "\ud800"],
)
def test_paths_that_leave_or_hide_are_refused(path: str) -> None:
    assert path_refusal(path)


@given(st.text(max_size=40))
def test_an_accepted_path_never_leaves_the_workspace(path: str) -> None:
    if not path_refusal(path):
        assert not path.startswith("/")
        assert ".." not in path.split("/")


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ({"../x": "1"}, r"workspace\.files\[0\]\.path"),
        ({"a": "1", "a/b": "2"}, r"workspace\.files"),
    ],
)
def test_bad_workspaces_name_the_field(texts: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        check_files("workspace", files(texts))


def test_a_file_in_the_way_of_a_folder_is_evidence() -> None:
    applied = apply_changes(PRISTINE, changed({"calc.py/x": "1", "pkg": "2"}), ("*",))
    assert applied.files == PRISTINE
    assert len(applied.evidence) == 2


def test_globs_span_folders() -> None:
    assert is_editable("pkg/mod.py", ("pkg/*",))
    assert is_editable("pkg/sub/mod.py", ("*.py",))
    assert not is_editable("pkg/mod.py", ("mod.py",))
