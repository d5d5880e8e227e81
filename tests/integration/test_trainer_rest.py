"""The trainer's REST edge, with nobody training behind it."""

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from practicum.clock import SystemClock
from practicum.db.migrate import upgrade
from practicum.errors import NotFound
from practicum.rest.app import create_app
from practicum.rpc.client import connect
from practicum.rpc.server import start_server
from practicum.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2
from services.trainer.progress import ProgressBoard
from services.trainer.rest.routes import CheckSuite, checkpoints_router, runs_router
from services.trainer.rpc.servicer import TrainerServicer
from services.trainer.rpc.suites import suite_check
from services.trainer.store import MIGRATIONS, TrainerStore, open_store
from tests.fixtures.trainer import model_folder, rl_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TrainerStore]:
    url = f"sqlite:///{tmp_path}/trainer.sqlite"
    upgrade(url, MIGRATIONS)
    opened = open_store(url, SystemClock())
    yield opened
    await opened.engine.dispose()


@pytest.fixture
async def client(store: TrainerStore) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(store) as opened:
        yield opened


@asynccontextmanager
async def client_of(
    store: TrainerStore, *, check_suite: CheckSuite | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    progress = ProgressBoard(SystemClock())
    app = create_app(
        title="trainer",
        description="test",
        token="t",
        routers=[
            runs_router(store, progress, lambda: None, check_suite=check_suite),
            checkpoints_router(store),
        ],
        readiness={},
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://trainer", headers={"Authorization": "Bearer t"}
    ) as opened:
        yield opened


def request_body(path: str, **changes: Any) -> dict[str, Any]:
    body = {"name": "r", "stage": "rl", "model": {"path": path}, "num_steps": 3, "rollout": {"suite": "s"}}
    body.update(changes)
    return {name: value for name, value in body.items() if value is not None}


async def post_as_written(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """POST a run with an Idempotency-Key, as a writer who knows NaN and lone surrogates would."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": "k"}
    return await client.post("/v1/runs", content=json.dumps(body), headers=headers)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stage": "sft"}, "rollout"),
        ({"rollout": None}, "rollout"),
        ({"stage": "sft", "rollout": None, "algorithm": {"kl_coef": 0.1}}, "algorithm"),
        ({"trajectories_per_step": 8}, "trajectories_per_step"),
        ({"model": {"path": "/nowhere/at/all"}}, "model.path"),
        ({"rollout": {"suite": "s", "top_p": 0.9}}, "rollout.top_p"),
        ({"rollout": {"suite": "s", "top_k": 50}}, "rollout.top_k"),
        ({"rollout": {"suite": "s", "group_size": 1}}, "rollout.group_size"),
        ({"rollout": {"suite": "s", "temperature": 0}}, "rollout.temperature"),
        ({"rollout": {"suite": "s", "max_tokens": 16}}, "rollout.max_new_tokens"),
        ({"microbatch_tokens": 64}, "microbatch_tokens"),
        ({"rollout": {"suite": "s", "colour": "red"}}, "rollout.colour"),
        ({"algorithm": {"dual_clip": 1.0}}, "algorithm.dual_clip"),
        ({"algorithm": {"advantage": "vibes"}}, "algorithm.advantage"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas"),
        ({"optimizer": {"warmup_steps": 9}}, "optimizer.warmup_steps"),
        ({"num_steps": 0}, "num_steps"),
        ({"stage": "dpo"}, "stage"),
        ({"nmae": "typo"}, "nmae"),
        ({"name": "nul\x00"}, "name"),
        ({"name": "half \ud83d"}, "name"),
        ({"model": {"path": "/models/\x00"}}, "model.path"),
        ({"model": {"path": "/" + "long/" * 900}}, "model.path"),
        ({"model": {"path": "/" + "long" * 100}}, "model.path"),
        ({"num_steps": 2**31}, "num_steps"),
        ({"microbatch_tokens": 2**31}, "microbatch_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"rollout": {"suite": "nul\x00"}}, "rollout.suite"),
        ({"rollout": {"suite": "half \ude00"}}, "rollout.suite"),
        ({"rollout": {"suite": "s", "max_tokens": 2**31}}, "rollout.max_tokens"),
        ({"rollout": {"suite": "s", "max_new_tokens": 2**31}}, "rollout.max_new_tokens"),
        ({"rollout": {"suite": "s", "seed": 2**63}}, "rollout.seed"),
        ({"rollout": {"suite": "s", "temperature": math.nan}}, "rollout.temperature"),
        ({"rollout": {"suite": "s", "temperature": 1e-320}}, "rollout.temperature"),
        ({"rollout": {"suite": "s", "top_p": math.nan}}, "rollout.top_p"),
        ({"algorithm": {"clip_high": math.inf}}, "algorithm.clip_high"),
        ({"algorithm": {"dual_clip": math.inf}}, "algorithm.dual_clip"),
        ({"algorithm": {"off_policy_cap": math.inf}}, "algorithm.off_policy_cap"),
        ({"algorithm": {"kl_coef": math.nan}}, "algorithm.kl_coef"),
        ({"algorithm": {"off_policy": "truncate"}}, "algorithm.off_policy"),
        ({"optimizer": {"eps": math.inf}}, "optimizer.eps"),
        ({"optimizer": {"weight_decay": math.inf}}, "optimizer.weight_decay"),
        ({"optimizer": {"clip_grad": math.nan}}, "optimizer.clip_grad"),
        ({"optimizer": {"betas": [0.9, math.nan]}}, "optimizer.betas[1]"),
    ],
)
async def test_post_runs_when_the_body_is_wrong_names_the_field_and_stores_nothing(
    client: httpx.AsyncClient, model: str, changes: dict[str, Any], field: str
) -> None:
    answer = await post_as_written(client, request_body(model, **changes))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [problem["field"] for problem in answer.json()["errors"]] == [field]
    assert (await client.get("/v1/runs")).json()["items"] == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "parrot"}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
async def test_post_runs_when_the_model_cannot_be_trained_names_the_field_of_its_config(
    client: httpx.AsyncClient, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    folder = model_folder(tmp_path / "odd")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    answer = await client.post("/v1/runs", json=request_body(str(folder)))
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["field"] == "model.path"
    assert f"{field}: " in problem["message"]
    assert (await client.get("/v1/runs")).json()["items"] == []


async def test_post_runs_when_everything_is_at_its_bound_is_stored_and_told(
    client: httpx.AsyncClient, store: TrainerStore, model: str
) -> None:
    rollout = {
        "suite": "s" * 400,
        "max_tokens": 2**24,
        "max_new_tokens": 2**24,
        "group_size": 1024,
        "groups_per_step": 4096,
        "max_staleness": 1000,
        "temperature": 0.01,
        "seed": 2**62,
    }
    changes = {"num_steps": 10_000_000, "microbatch_tokens": 2**24, "seed": 2**62, "rollout": rollout}
    answer = await post_as_written(client, request_body(model, name="n\U0001f600", **changes))
    assert answer.status_code == 201
    listed = await TrainerServicer(store, lambda _: None).ListRuns(trainer_pb2.ListRunsRequest(), None)
    assert [run.rollout.seed for run in listed.runs] == [2**62]


async def test_list_runs_when_one_cannot_be_told_tells_the_others(store: TrainerStore) -> None:
    await store.runs.create(rl_spec(max_tokens=2**40))
    fine = await store.runs.create(rl_spec())
    listed = await TrainerServicer(store, lambda _: None).ListRuns(trainer_pb2.ListRunsRequest(), None)
    assert [run.run_id for run in listed.runs] == [fine.run_id]


class Suites(rollout_pb2_grpc.RolloutServiceServicer):
    """A rollout service that knows a few suites."""

    async def GetSuite(
        self, request: rollout_pb2.GetSuiteRequest, context: Any
    ) -> rollout_pb2.GetSuiteResponse:
        """By name; the second count is of those that wait."""
        known = {"ready": (2, 0), "waiting": (0, 2), "rejected": (0, 0)}
        if request.suite not in known:
            raise NotFound(f"there is no suite {request.suite!r}")
        admitted, admitting = known[request.suite]
        return rollout_pb2.GetSuiteResponse(
            suite_id="suite_1", num_train_admitted=admitted, num_train_admitting=admitting
        )


async def test_post_runs_when_the_suite_cannot_be_sampled_stores_nothing(
    store: TrainerStore, model: str
) -> None:
    rollout = await start_server(
        [lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Suites(), server)],
        service_names=["practicum.v1.RolloutService"],
        address="127.0.0.1:0",
        token="t",
    )
    async with (
        connect(f"127.0.0.1:{rollout.port}", token="t") as channel,
        client_of(store, check_suite=suite_check(channel)) as client,
    ):
        for suite, word in (("nowhere", "there is no suite"), ("rejected", "no task")):
            answer = await client.post("/v1/runs", json=request_body(model, rollout={"suite": suite}))
            assert answer.status_code == 422
            (problem,) = answer.json()["errors"]
            assert problem["field"] == "rollout.suite"
            assert word in problem["message"]
        assert (await client.get("/v1/runs")).json()["items"] == []
        for suite in ("ready", "waiting"):
            answer = await client.post("/v1/runs", json=request_body(model, rollout={"suite": suite}))
            assert answer.status_code == 201
        sft = request_body(model, stage="sft", rollout=None)
        await rollout.stop(0)
        answer = await client.post("/v1/runs", json=request_body(model, rollout={"suite": "ready"}))
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert (await client.post("/v1/runs", json=sft)).status_code == 201
        assert len((await client.get("/v1/runs")).json()["items"]) == 3


async def test_post_runs_when_it_is_right_answers_the_run_with_defaults_filled_in(
    client: httpx.AsyncClient, model: str
) -> None:
    answer = await client.post("/v1/runs", json=request_body(model))
    assert answer.status_code == 201
    body = answer.json()
    assert (body["state"], body["weight_version"], body["published_version"], body["steps"]) == (
        "pending",
        0,
        None,
        [],
    )
    assert body["request"]["rollout"]["max_staleness"] == 2
    assert body["request"]["algorithm"]["clip_high"] == 0.28
    assert (await client.get(f"/v1/runs/{body['run_id']}")).json() == body
    # What comes back can be sent again.
    again = {**body["request"]}
    del again["trajectories_per_step"]
    assert (await client.post("/v1/runs", json=again)).status_code == 201


async def test_F08_post_runs_when_the_key_repeats_answers_the_same_run(
    client: httpx.AsyncClient, model: str
) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = [
        await client.post("/v1/runs", json=request_body(model), headers=headers) for _ in range(2)
    ]
    assert first.json()["run_id"] == second.json()["run_id"]
    other = await client.post("/v1/runs", json=request_body(model, num_steps=4), headers=headers)
    assert other.status_code == 422
    assert other.json()["errors"][0]["field"] == "Idempotency-Key"
    assert len((await client.get("/v1/runs")).json()["items"]) == 1


async def test_get_runs_when_there_are_more_than_a_page_gives_each_once(
    client: httpx.AsyncClient, model: str
) -> None:
    made = [(await client.post("/v1/runs", json=request_body(model))).json()["run_id"] for _ in range(5)]
    seen, token = [], None
    while True:
        params = {"page_size": 2} | ({"page_token": token} if token else {})
        page = (await client.get("/v1/runs", params=params)).json()
        seen += [run["run_id"] for run in page["items"]]
        token = page["next_page_token"]
        if token is None:
            break
    assert seen == made
    assert (await client.get("/v1/runs", params={"page_token": "bogus"})).status_code == 422
    assert (await client.get("/v1/runs", params={"page_size": 1000})).status_code == 422
    assert (await client.get("/v1/runs", params={"state": "running"})).json()["items"] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/runs/nobody"),
        ("POST", "/v1/runs/nobody:pause"),
        ("POST", "/v1/runs/nobody:resume"),
        ("POST", "/v1/runs/nobody:stop"),
        ("GET", "/v1/runs/nobody/quarantine"),
        ("GET", "/v1/checkpoints/nobody"),
    ],
)
async def test_routes_when_there_is_no_such_thing_answer_404(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_verbs_when_the_run_waits_change_its_state(client: httpx.AsyncClient, model: str) -> None:
    run_id = (await client.post("/v1/runs", json=request_body(model))).json()["run_id"]
    states = []
    for verb in ("pause", "pause", "resume", "resume", "stop"):
        states.append((await client.post(f"/v1/runs/{run_id}:{verb}")).json()["state"])
    assert states == ["paused", "paused", "pending", "pending", "stopped"]
    answer = await client.post(f"/v1/runs/{run_id}:stop")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


async def test_openapi_when_read_describes_every_field_and_route(client: httpx.AsyncClient) -> None:
    spec = (await client.get("/openapi.json")).json()
    bare = [
        f"{name}.{field}"
        for name, schema in spec["components"]["schemas"].items()
        if name not in ("HTTPValidationError", "ValidationError")
        for field, value in schema.get("properties", {}).items()
        if "description" not in value
    ]
    assert bare == []
    assert len(spec["components"]["schemas"]["RunRequest"]["examples"]) == 2
    for path, operations in spec["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path


async def test_routes_when_the_token_is_missing_answer_401(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/runs", headers={"Authorization": ""})
    assert answer.status_code == 401
