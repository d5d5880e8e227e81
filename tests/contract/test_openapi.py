"""What the OpenAPI document of every service promises its readers: nothing is left without words.

A document is made from the routes' signatures alone, so nothing stands behind these routes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.rollout import rollout_service
from tests.fixtures.service_apps import SERVICES, service_app

Json = dict[str, Any]


@pytest.fixture(params=SERVICES)
async def document(request: pytest.FixtureRequest, tmp_path: Path) -> Json:
    """The OpenAPI document of each service in turn."""
    async with service_app(request.param, tmp_path) as app:
        return dict(app.openapi())


def operations(document: Json) -> Iterator[tuple[str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def resolved(document: Json, schema: Mapping[str, Any]) -> Json:
    """The schema behind a reference."""
    name = schema.get("$ref", "").removeprefix("#/components/schemas/")
    return dict(document["components"]["schemas"][name] if name else schema)


async def test_operation_when_listed_has_a_summary_and_a_description(document: Json) -> None:
    bare = [
        name for name, item in operations(document) if not item.get("summary") or not item.get("description")
    ]
    assert bare == []


async def test_parameter_when_listed_has_a_description(document: Json) -> None:
    bare = [
        (name, parameter["name"])
        for name, item in operations(document)
        for parameter in item.get("parameters", [])
        if not parameter.get("description")
    ]
    assert bare == []


async def test_field_when_listed_has_a_description(document: Json) -> None:
    bare = [
        f"{name}.{field}"
        for name, schema in document["components"]["schemas"].items()
        for field, value in schema.get("properties", {}).items()
        if not value.get("description")
    ]
    assert bare == []


async def test_request_body_when_taken_shows_an_example_that_fits(document: Json) -> None:
    bodies = {
        name: resolved(document, item["requestBody"]["content"]["application/json"]["schema"])
        for name, item in operations(document)
        if "requestBody" in item
    }
    assert bodies
    for name, schema in bodies.items():
        assert schema.get("examples"), name
        for example in schema["examples"]:
            assert schema["required"], name
            assert set(schema["required"]) <= set(example), name
            assert set(example) <= set(schema["properties"]), name


async def test_error_when_declared_is_a_problem_in_its_own_media_type(document: Json) -> None:
    for name, item in operations(document):
        errors = {status: answer for status, answer in item["responses"].items() if status >= "400"}
        if name.split()[1].startswith("/v1/"):
            assert {"401", "403", "404", "409", "422", "429", "503"} <= set(errors), name
        for status, answer in errors.items():
            assert list(answer["content"]) == ["application/problem+json"], (name, status)
            reference = answer["content"]["application/problem+json"]["schema"]["$ref"]
            assert reference == "#/components/schemas/Problem", (name, status)


async def test_suite_when_posted_may_answer_that_it_was_stored_before(tmp_path: Path) -> None:
    async with rollout_service(tmp_path, workers=[]) as rollout:
        document = rollout.service.app.openapi()
    answers = document["paths"]["/v1/suites"]["post"]["responses"]
    for status in ("200", "201"):
        assert answers[status]["content"]["application/json"]["schema"] == {
            "$ref": "#/components/schemas/SuiteView"
        }
