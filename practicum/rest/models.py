"""Shapes that every REST answer shares."""

import json
from collections.abc import Mapping
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

PROBLEM_MEDIA_TYPE = "application/problem+json"

T = TypeVar("T")


class ApiModel(BaseModel):
    """Base of request and response bodies: an unknown field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid")


class Page(ApiModel, Generic[T]):
    """One page of a listing."""

    items: list[T] = Field(description="At most `page_size` items.")
    next_page_token: str | None = Field(
        default=None, description="Give it as `page_token` for the next page; null on the last one."
    )


class FieldProblem(ApiModel):
    """One part of a request that is wrong."""

    field: str = Field(description="Where, as a path into the request.", examples=["tasks[0].grader.kind"])
    message: str = Field(description="What is wrong and how to mend it.")


class Problem(ApiModel):
    """RFC 9457 problem details."""

    type: str = Field(default="about:blank", description="A URI that names the kind of problem.")
    title: str = Field(description="The kind in words.", examples=["Invalid input"])
    status: int = Field(description="The HTTP status.", examples=[422])
    detail: str = Field(description="What happened here.")
    code: str = Field(description="A stable word for programs.", examples=["invalid_input"])
    trace_id: str = Field(description="Find the request in the logs by this.")
    errors: list[FieldProblem] = Field(default=[], description="By field, where the input is wrong.")


def problem_response(problem: Problem, headers: Mapping[str, str]) -> Response:
    """The problem as the answer of a request."""
    return Response(
        # Escaped to ASCII: a field may be named by half a character, which JSON can write and UTF-8 cannot.
        json.dumps(problem.model_dump()),
        status_code=problem.status,
        headers=dict(headers),
        media_type=PROBLEM_MEDIA_TYPE,
    )
