"""Bad input to the rollout service: 4xx problem+json that names the field, and nothing stored."""

import base64
import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path

import pytest

from services.reward.integrity import paths
from services.reward.rpc import convert
from services.reward.sandbox.limits import LARGEST, SMALLEST, SandboxLimits
from services.rollout.rest.models import LIMIT_BOUNDS, MAX_GRADER_TIMEOUT_S, MAX_TASK_BYTES
from services.rollout.rest.workspaces import (
    MAX_FILES,
    MAX_PATH_LENGTH,
    MAX_WORKSPACE_BYTES,
    check_path,
    check_tree,
    unpack_tar,
)
from services.rollout.scheduler.runs import RunState
from tests.fixtures.rollout import Rollout, make_run, rollout_service, suite_body, task_body
from tests.fixtures.scripted_engine import Json


@pytest.fixture
async def rollout(tmp_path: Path) -> AsyncIterator[Rollout]:
    """A service without its workers: nothing is played."""
    async with rollout_service(tmp_path, workers=[]) as service:
        yield service


def tar_of(*members: tuple[str, bytes] | tarfile.TarInfo, mode: str = "w") -> str:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            name, content = member
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return base64.b64encode(packed.getvalue()).decode()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def with_tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> Json:
    return {"workspace": {"tar_base64": tar_of(*members)}}


GRADER = task_body()["grader"]
LINK = tarfile.SYMTYPE
HALF = "\ud800"  # half of a surrogate pair: JSON can write it, no database and no file can hold it
MEBIBYTE = 1 << 20


def with_grader(**changes: object) -> Json:
    return {"grader": GRADER | changes}


def with_reference(**changes: object) -> Json:
    return {"reference": changes}


BAD_TASKS: list[tuple[str, Json, str]] = [
    ("unknown field", {"colour": "red"}, "colour"),
    ("unknown nested field", {"grader": GRADER | {"secret": 1}}, "grader.secret"),
    ("no name", {"name": ""}, "name"),
    ("odd name", {"name": "a\nb"}, "name"),
    ("unknown split", {"split": "test"}, "split"),
    ("instruction is no text", {"instruction": 3}, "instruction"),
    ("instruction with U+0000", {"instruction": "a\x00b"}, "instruction"),
    ("unknown grader", {"grader": GRADER | {"kind": "vibes"}}, "grader.kind"),
    ("grader without files", {"grader": GRADER | {"files": {}}}, "grader.files"),
    ("grader outside the workspace", {"grader": GRADER | {"files": {"../x": ""}}}, "grader.files"),
    ("grader without time", {"grader": GRADER | {"timeout_s": 0}}, "grader.timeout_s"),
    ("no tool", {"tools": []}, "tools"),
    ("unknown tool", {"tools": ["read_file", "rm"]}, "tools[1]"),
    ("negative limit", {"limits": {"memory_bytes": -1}}, "limits.memory_bytes"),
    ("limit is not a number", {"limits": {"cpu_s": "much"}}, "limits.cpu_s"),
    ("tags are no list", {"tags": "x"}, "tags"),
    ("no workspace", {"workspace": {}}, "workspace"),
    ("two workspaces", {"workspace": {"files": {}, "tar_base64": tar_of()}}, "workspace"),
    ("parent in a path", {"workspace": {"files": {"../x": ""}}}, "workspace.files"),
    ("absolute path", {"workspace": {"files": {"/etc/passwd": ""}}}, "workspace.files"),
    ("file and folder", {"workspace": {"files": {"a": "", "a/b": ""}}}, "workspace.files"),
    ("no base64", {"workspace": {"tar_base64": "§"}}, "workspace.tar_base64"),
    ("no tar", {"workspace": {"tar_base64": base64.b64encode(b"x" * 600).decode()}}, "workspace.tar_base64"),
    ("tar with parent", with_tar(("../x", b"")), "workspace.tar_base64"),
    ("tar with hidden parent", with_tar(("a/../../x", b"")), "workspace.tar_base64"),
    ("tar with absolute path", with_tar(("/etc/x", b"")), "workspace.tar_base64"),
    ("tar with a link out", with_tar(special("a", LINK, "/etc/passwd")), "workspace.tar_base64"),
    ("tar with a relative link out", with_tar(special("a", LINK, "../../x")), "workspace.tar_base64"),
    (
        "tar with a hard link",
        with_tar(("b", b""), special("a", tarfile.LNKTYPE, "b")),
        "workspace.tar_base64",
    ),
    ("tar with a device", with_tar(special("null", tarfile.CHRTYPE)), "workspace.tar_base64"),
    ("tar with a pipe", with_tar(special("pipe", tarfile.FIFOTYPE)), "workspace.tar_base64"),
    ("tar with a path twice", with_tar(("a", b"1"), ("a", b"2")), "workspace.tar_base64"),
    ("tar with an odd name", with_tar(("a\udcff", b"")), "workspace.tar_base64"),
    ("path inside .git", {"workspace": {"files": {"a/.Git/config": ""}}}, "workspace.files"),
    ("path too long", {"workspace": {"files": {"x" * 513: ""}}}, "workspace.files"),
    ("too many files", {"workspace": {"files": {f"f{n}": "" for n in range(2001)}}}, "workspace.files"),
    ("half a character in a file", {"workspace": {"files": {"a": HALF}}}, "workspace.files"),
    ("half a character in a path", {"workspace": {"files": {HALF: ""}}}, "workspace.files"),
    ("half a character in the instruction", {"instruction": HALF}, "instruction"),
    ("half a character in a tag", {"tags": [HALF]}, "tags"),
    ("half a character in a glob", with_grader(editable=[HALF]), "grader.editable"),
    ("half a character in a hidden test", with_grader(files={"test_a.py": HALF}), "grader.files"),
    ("half a character in an unknown field", {HALF: 1}, ""),
    ("grader without an editable path", with_grader(editable=[]), "grader.editable"),
    ("grader that takes too long", with_grader(timeout_s=901), "grader.timeout_s"),
    ("grader without a test file", with_grader(files={"check.py": "", "tests.py": ""}), "grader.files"),
    ("grader whose test is no Python", with_grader(files={"test_a.py": "def ("}), "grader.files"),
    (
        "grader with one test that is no Python",
        with_grader(files={"test_a.py": "", "x_test.py": "("}),
        "grader",
    ),
    ("grader whose test only parses", with_grader(files={"test_a.py": "return"}), "grader.files"),
    ("grader whose test holds U+0000", with_grader(files={"test_a.py": "\x00"}), "grader.files"),
    ("limit below what starts Python", {"limits": {"memory_bytes": MEBIBYTE}}, "limits.memory_bytes"),
    ("limit above the largest", {"limits": {"call_wall_s": 901}}, "limits.call_wall_s"),
    ("reference outside", with_reference(files={"/x": ""}), "reference.files"),
    ("reference with half a character", with_reference(files={"calc.py": HALF}), "reference.files"),
    ("reference with file and folder", with_reference(files={"a": "", "a/b": ""}), "reference.files"),
    ("reference too large", with_reference(files={"a": "x" * (33 * MEBIBYTE)}), "reference.files"),
    ("reference removes outside", with_reference(removed=["../x"]), "reference.removed"),
    ("reference changes what it removes", with_reference(files={"a": ""}, removed=["a"]), "reference"),
    ("unknown suite", {"suite": "nothing"}, "suite"),
]


@pytest.mark.parametrize(("change", "field"), [case[1:] for case in BAD_TASKS], ids=[c[0] for c in BAD_TASKS])
async def test_task_when_malformed_is_refused_by_field_and_not_stored(
    rollout: Rollout, change: Json, field: str
) -> None:
    await rollout.post("/v1/suites", suite_body(1), expect=201)
    problem = await rollout.post("/v1/tasks", task_body() | {"suite": "bugs"} | change, expect=422)
    assert problem["code"] == "invalid_input"
    assert problem["trace_id"]
    assert problem["errors"][0]["field"].startswith(field), problem
    assert len((await rollout.get("/v1/tasks"))["items"]) == 1


async def test_task_when_its_parts_are_too_large_together_is_refused_with_the_sizes(rollout: Rollout) -> None:
    await rollout.post("/v1/suites", suite_body(1), expect=201)
    text = "x" * (22 * MEBIBYTE)
    large = {"workspace": {"files": {"a": text}}, "reference": {"files": {"a": text}}} | with_grader(
        files={"test_a.py": "", "data": text}
    )
    problem = await rollout.post("/v1/tasks", task_body("two") | {"suite": "bugs"} | large, expect=422)
    assert f"hold {3 * len(text)} bytes together; at most {MAX_TASK_BYTES}" in problem["detail"]
    fitting = {"workspace": {"files": {"a": text}}, "reference": {"files": {"a": text}}}
    await rollout.post("/v1/tasks", task_body("two") | {"suite": "bugs"} | fitting, expect=201)


@pytest.mark.parametrize(
    "change",
    [
        with_grader(files={"pkg/calc_test.py": "", "data.txt": "def ("}),
        with_grader(files={"test_a.py": "PATTERN = '\\d'\n"}),  # a warning is no error
        with_grader(timeout_s=900),
        {"limits": {"session_wall_s": 4 * 3600, "memory_bytes": 128 * MEBIBYTE, "cpu_s": 0}},
        {"workspace": {"files": {"x" * 512: ""}}},
        with_reference(files={"calc.py": ""}, removed=["old.py"]),
    ],
)
async def test_task_when_at_a_bound_is_stored(rollout: Rollout, change: Json) -> None:
    await rollout.post("/v1/suites", suite_body(1), expect=201)
    await rollout.post("/v1/tasks", task_body("two") | {"suite": "bugs"} | change, expect=201)


def test_bounds_when_compared_are_those_of_the_reward_service() -> None:
    reward_bounds = {
        field.name: (getattr(SMALLEST, field.name), getattr(LARGEST, field.name))
        for field in fields(SandboxLimits)
    }
    assert reward_bounds == LIMIT_BOUNDS
    assert convert.MAX_GRADER_TIMEOUT_S == MAX_GRADER_TIMEOUT_S
    assert (MAX_FILES, MAX_WORKSPACE_BYTES, MAX_PATH_LENGTH) == (
        paths.MAX_WORKSPACE_FILES,
        paths.MAX_WORKSPACE_BYTES,
        paths.MAX_PATH_CHARS,
    )


async def test_suite_when_one_task_is_bad_stores_none(rollout: Rollout) -> None:
    body = suite_body(3)
    body["tasks"][2]["tools"] = ["read_file", "rm"]
    problem = await rollout.post("/v1/suites", body, expect=422)
    assert problem["errors"][0]["field"] == "tasks[2].tools[1]"
    body = suite_body(3)
    body["tasks"][1]["split"] = "x"
    problem = await rollout.post("/v1/suites", body, expect=422)
    assert problem["errors"][0]["field"] == "tasks[1].split"
    body = suite_body(3)
    body["tasks"][1]["name"] = body["tasks"][0]["name"]
    problem = await rollout.post("/v1/suites", body, expect=422)
    assert problem["errors"][0]["field"] == "tasks"
    assert (await rollout.get("/v1/suites"))["items"] == []
    assert (await rollout.get("/v1/tasks"))["items"] == []


async def test_suite_when_posted_again_is_the_same_and_other_tasks_need_a_version(rollout: Rollout) -> None:
    first = await rollout.post("/v1/suites", suite_body(3), expect=201)
    assert await rollout.post("/v1/suites", suite_body(3), expect=200) == first
    problem = await rollout.post("/v1/suites", suite_body(4), expect=409)
    assert problem["code"] == "conflict"
    await rollout.post("/v1/suites", suite_body(4, version="2"), expect=201)
    page = await rollout.get("/v1/suites?page_size=1")
    assert page["items"] == [first]
    last = await rollout.get(f"/v1/suites?page_size=1&page_token={page['next_page_token']}")
    assert (last["items"][0]["version"], last["next_page_token"]) == ("2", None)


async def test_task_when_stored_shows_no_hidden_test(rollout: Rollout) -> None:
    await rollout.post("/v1/suites", suite_body(1), expect=201)
    files = (("./calc.py", b"\xff\x00"), ("pkg/x.py", b""))
    body = task_body("two", workspace={"tar_base64": tar_of(*files, mode="w:gz")}) | {"suite": "bugs@1"}
    made = await rollout.post("/v1/tasks", body, expect=201)
    assert made["state"] == "admitting"
    shown = await rollout.get(f"/v1/tasks/{made['task_id']}")
    assert shown == made
    assert shown["files"] == ["calc.py", "pkg/x.py"]
    assert "test_hidden" not in str(shown)
    await rollout.post("/v1/tasks", body, expect=409)
    await rollout.get("/v1/tasks/task_none", expect=404)
    assert [task["name"] for task in (await rollout.get("/v1/tasks?state=admitting"))["items"]] == ["two"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"suite": "nothing"}, "suite"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"num_tasks": 99}, "num_tasks"),
        ({"split": "dev"}, "split"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"episodes_per_task": 0}, "episodes_per_task"),
        ({"max_turns": 0}, "max_turns"),
        ({"top_p": 0.9}, "top_p"),
        ({"seed": -1}, "seed"),
    ],
)
async def test_evaluation_when_malformed_is_refused_by_field(
    rollout: Rollout, change: Json, field: str
) -> None:
    await rollout.post("/v1/suites", suite_body(4), expect=201)
    body = {"suite": "bugs", "num_tasks": 1} | change
    problem = await rollout.post("/v1/evaluations", body, expect=422)
    assert problem["errors"][0]["field"] == field
    assert (await rollout.get("/v1/episodes"))["items"] == []


async def test_evaluation_when_posted_again_with_its_key_is_the_same(rollout: Rollout) -> None:
    await rollout.post("/v1/suites", suite_body(4), expect=201)
    body = {"suite": "bugs", "num_tasks": 2, "episodes_per_task": 2}
    first = await rollout.post("/v1/evaluations", body, expect=202, key="k")
    assert await rollout.post("/v1/evaluations", body, expect=202, key="k") == first
    episodes = (await rollout.get(f"/v1/episodes?evaluation_id={first['evaluation_id']}"))["items"]
    assert len((await rollout.get("/v1/episodes"))["items"]) == len(episodes) == 4
    problem = await rollout.post("/v1/evaluations", body | {"seed": 1}, expect=422, key="k")
    assert problem["errors"][0]["field"] == "Idempotency-Key"
    other = await rollout.post("/v1/evaluations", body, expect=202)
    assert other != first
    problem = await rollout.post("/v1/evaluations", body, expect=422, key="k" * 201)
    assert problem["errors"][0]["field"] == "Idempotency-Key"


DEMONSTRATION: Json = {"task": "task-0", "turns": [{"tool_calls": [{"name": "finish", "arguments": {}}]}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"run_id": "run_none"}, "run_id"),
        ({"suite": "nothing"}, "suite"),
        ({"demonstrations": []}, "demonstrations"),
        ({"demonstrations": [DEMONSTRATION | {"turns": []}]}, "demonstrations[0].turns"),
        ({"demonstrations": [DEMONSTRATION, DEMONSTRATION | {"task": "x"}]}, "demonstrations[1].task"),
        ({"demonstrations": [DEMONSTRATION | {"turns": [{"text": 1}]}]}, "demonstrations[0].turns[0].text"),
        (
            {
                "demonstrations": [
                    DEMONSTRATION
                    | {"turns": [{"tool_calls": [{"name": "x", "arguments": {"a": [{HALF: 1}]}}]}]}
                ]
            },
            "demonstrations[0].turns[0].tool_calls[0].arguments",
        ),
        (
            {"demonstrations": [DEMONSTRATION | {"turns": [{"tool_calls": [{"name": "x"}]}]}]},
            "demonstrations[0].turns[0].tool_calls[0].arguments",
        ),
    ],
)
async def test_demonstrations_when_malformed_are_refused_by_field(
    rollout: Rollout, change: Json, field: str
) -> None:
    await rollout.post("/v1/suites", suite_body(2), expect=201)
    rollout.trainer.runs["run_1"] = make_run()
    body = {"run_id": "run_1", "demonstrations": [DEMONSTRATION]} | change
    problem = await rollout.post("/v1/demonstrations", body, expect=422)
    assert problem["errors"][0]["field"] == field
    assert (await rollout.get("/v1/episodes"))["items"] == []


async def test_demonstrations_when_their_run_is_over_or_names_are_ambiguous_are_refused(
    rollout: Rollout,
) -> None:
    await rollout.post("/v1/suites", suite_body(2), expect=201)
    await rollout.post("/v1/suites", suite_body(3, version="2"), expect=201)
    rollout.trainer.runs["run_1"] = make_run()
    body = {"run_id": "run_1", "demonstrations": [DEMONSTRATION]}
    problem = await rollout.post("/v1/demonstrations", body, expect=422)
    assert "give suite" in problem["detail"]
    await rollout.post("/v1/demonstrations", body | {"suite": "bugs@1"}, expect=202)
    rollout.trainer.runs["run_1"] = make_run(state=RunState.FAILED)
    await rollout.post("/v1/demonstrations", body | {"suite": "bugs@1"}, expect=409)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/tasks?state=maybe",
        "/v1/tasks?page_token=x",
        "/v1/tasks?page_size=0",
        "/v1/tasks?suite=nothing",
        "/v1/episodes?state=maybe",
        "/v1/episodes?page_token=bm9uZQ",
    ],
)
async def test_listing_when_a_filter_is_bad_is_refused(rollout: Rollout, path: str) -> None:
    problem = await rollout.get(path, expect=422)
    assert problem["errors"][0]["field"] == path.split("?")[1].split("=")[0]


@pytest.mark.parametrize(
    "path", ["/v1/episodes/x", "/v1/evaluations/x", "/v1/demonstrations/x", "/v1/tasks/x"]
)
async def test_resource_when_unknown_is_not_found(rollout: Rollout, path: str) -> None:
    assert (await rollout.get(path, expect=404))["code"] == "not_found"


async def test_caller_when_without_a_token_is_refused(rollout: Rollout) -> None:
    answer = await rollout.rest.get("/v1/tasks", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert (await rollout.rest.get("/healthz", headers={"Authorization": ""})).status_code == 200


async def test_openapi_when_asked_describes_every_route(rollout: Rollout) -> None:
    schema = (await rollout.rest.get("/openapi.json")).json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("summary"), (method, path)
    assert schema["components"]["schemas"]["TaskModel"]["properties"]["tools"]["examples"]


@pytest.mark.parametrize("path", ["a.py", "pkg/a.py", ".hidden", "a b/ü.py", "..a/b.."])
def test_path_when_plain_passes(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "a//b",
        ".git",
        "a/.GIT/x",
        "\ud800",
        "./a",
        "a/.",
        "..",
        "a/../b",
        "a\\b",
        "a\nb",
        "a/",
        "x" * 2000,
    ],
)
def test_path_when_not_plain_is_refused(path: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 — the reasons differ
        check_path(path)


def test_tar_when_it_would_unpack_past_the_bound_is_refused_before_it_does() -> None:
    info = tarfile.TarInfo("zeros")
    info.size = MAX_WORKSPACE_BYTES + 1
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(info, _Zeros())
    with pytest.raises(ValueError, match="more than"):
        unpack_tar(base64.b64encode(packed.getvalue()).decode())


class _Zeros(io.RawIOBase):
    """Zeros for whoever reads it."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def test_tree_when_deep_names_the_file_in_the_way() -> None:
    check_tree(["a/b/c", "a/b/d", "a/e"])
    with pytest.raises(ValueError, match="'a/b' is a file"):
        check_tree(["a/b/c/d", "a/b"])
