"""The trainer's REST edge, with nobody training behind it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from practicum.clock import SystemClock
from practicum.db.migrate import upgrade
from practicum.rest.app import create_app
from services.trainer.progress import ProgressBoard
from services.trainer.rest.routes import checkpoints_router, runs_router
from services.trainer.store import MIGRATIONS, open_store
from tests.fixtures.trainer import model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    url = f"sqlite:///{tmp_path}/trainer.sqlite"
    upgrade(url, MIGRATIONS)
    store = open_store(url, SystemClock())
    app = create_app(
        title="trainer",
        description="test",
        token="t",
        routers=[runs_router(store, ProgressBoard(SystemClock()), lambda: None), checkpoints_router(store)],
        readiness={},
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://trainer", headers={"Authorization": "Bearer t"}
    ) as opened:
        yield opened
    await store.engine.dispose()


def request_body(path: str, **changes: Any) -> dict[str, Any]:
    body = {"name": "r", "stage": "rl", "model": {"path": path}, "num_steps": 3, "rollout": {"suite": "s"}}
    body.update(changes)
    return {name: value for name, value in body.items() if value is not None}


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
    ],
)
async def test_post_runs_when_the_body_is_wrong_names_the_field_and_stores_nothing(
    client: httpx.AsyncClient, model: str, changes: dict[str, Any], field: str
) -> None:
    answer = await client.post("/v1/runs", json=request_body(model, **changes))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [problem["field"] for problem in answer.json()["errors"]] == [field]
    assert (await client.get("/v1/runs")).json()["items"] == []


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
