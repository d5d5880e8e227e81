"""The REST frame every service shares: token, problem+json, operations endpoints, pages."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated

import httpx
import pytest
from fastapi import APIRouter, Query

from practicum.auth.scopes import Scope
from practicum.errors import Conflict, InvalidInput, Overloaded
from practicum.rest.access import ScopedRoute, needs
from practicum.rest.app import create_app
from practicum.rest.models import ApiModel
from practicum.rest.paging import decode_page_token, encode_page_token


class Body(ApiModel):
    """A body with one field."""

    name: str


broken: list[str] = []


async def check_database() -> None:
    if broken:
        raise ConnectionError("no answer")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    broken.clear()
    router = APIRouter(route_class=ScopedRoute)

    @router.post("/v1/things", dependencies=[needs(Scope.SUBMIT)])
    async def create(body: Body) -> dict[str, str]:
        match body.name:
            case "taken":
                raise Conflict("the name is taken")
            case "busy":
                raise Overloaded("later", retry_after_s=3)
            case "bug":
                raise RuntimeError("a secret path")
        return {"name": body.name}

    @router.get("/v1/things", dependencies=[needs(Scope.SUBMIT)])
    async def listing(page_size: Annotated[int, Query(ge=1, le=10)] = 5) -> dict[str, int]:
        return {"page_size": page_size}

    app = create_app(
        title="t",
        description="d",
        token="right",
        routers=[router],
        readiness={"database": check_database},
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer right"}
    async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as made:
        yield made


async def test_request_when_the_token_is_missing_or_wrong_is_401(client: httpx.AsyncClient) -> None:
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
        answer = await client.post("/v1/things", json={"name": "a"}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "unauthorized"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/openapi.json"])
async def test_operations_when_asked_without_a_token_answer(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path, headers={"Authorization": ""})
    assert answer.status_code == 200


async def test_readyz_when_a_dependency_fails_names_it(client: httpx.AsyncClient) -> None:
    broken.append("database")
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "database: no answer"
    assert (await client.get("/healthz")).status_code == 200


async def test_request_when_a_field_is_unknown_or_missing_names_it(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/things", json={"nam": "a"})
    assert answer.status_code == 422
    assert {item["field"] for item in answer.json()["errors"]} == {"name", "nam"}
    assert answer.json()["trace_id"] == answer.headers["X-Trace-Id"]
    listing = await client.get("/v1/things", params={"page_size": 11})
    assert [item["field"] for item in listing.json()["errors"]] == ["page_size"]


async def test_request_when_the_service_refuses_carries_code_and_headers(client: httpx.AsyncClient) -> None:
    taken = await client.post("/v1/things", json={"name": "taken"})
    assert (taken.status_code, taken.json()["code"]) == (409, "conflict")
    busy = await client.post("/v1/things", json={"name": "busy"})
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")


async def test_request_when_the_service_has_a_bug_hides_its_text(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/things", json={"name": "bug"})
    assert answer.status_code == 500
    assert "secret" not in answer.text


async def test_trace_id_when_the_caller_gives_one_is_kept(client: httpx.AsyncClient) -> None:
    trace_id = "ab" * 16
    answer = await client.get("/v1/things", headers={"traceparent": f"00-{trace_id}-{'1' * 16}-01"})
    assert answer.headers["X-Trace-Id"] == trace_id


def test_page_token_when_round_tripped_gives_the_same_key() -> None:
    moment = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
    assert decode_page_token(encode_page_token(moment, "task_1")) == (moment, "task_1")


@pytest.mark.parametrize("token", ["", "x", "WzEsIDJd", "bm90IGpzb24", "é"])
def test_page_token_when_forged_is_invalid_input(token: str) -> None:
    with pytest.raises(InvalidInput, match="page_token"):
        decode_page_token(token)
