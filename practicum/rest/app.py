"""The application that each service's REST edge is built on.

Owns problem+json answers, `/healthz`, `/readyz` and `/metrics`, and that no other route is served
without a scope. `/healthz` says that the process lives; `/readyz` asks each dependency and answers 503
with the names of those that fail, so that a busy service is not mistaken for a dead one. Those three
and the documents under `/docs` need no token: they are for who can reach the service's own port.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from practicum import __version__
from practicum.auth.keyring import Keyring
from practicum.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    PracticumError,
    QueueError,
    Unauthorized,
)
from practicum.rest.access import check_scoped
from practicum.rest.models import PROBLEM_MEDIA_TYPE, FieldProblem, Problem, problem_response
from practicum.rpc.codes import RpcUnavailable
from practicum.telemetry.logs import get_logger

log = get_logger("practicum.rest")

READINESS_TIMEOUT_S = 5.0
Readiness = Mapping[str, Callable[[], Awaitable[None]]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_STATUS_BY_CODE = {
    InvalidInput.code: 422,
    NotFound.code: 404,
    Conflict.code: 409,
    Unauthorized.code: 401,
    Forbidden.code: 403,
    Overloaded.code: 429,
    QueueError.code: 503,
    "queue_full": 503,
    RpcUnavailable.code: 503,
}
_TITLES = {
    400: "Bad request",
    401: "Token missing or wrong",
    403: "Scope missing",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Body too large",
    422: "Invalid input",
    429: "Overloaded",
    500: "Internal error",
    503: "Dependency unavailable",
}
_PROBLEM_ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": _TITLES[status]}
    for status in (401, 403, 404, 409, 422, 429, 500, 503)
}


class _Application(FastAPI):
    """FastAPI, whose schema says in which media type problems are answered."""

    def openapi(self) -> dict[str, Any]:
        """FastAPI declares every model under the media type of the route's own answer."""
        is_made = self.openapi_schema is not None
        schema = super().openapi()
        if not is_made:
            for path in schema["paths"].values():
                for operation in path.values():
                    for status, answer in operation["responses"].items():
                        if status >= "400" and "application/json" in answer.get("content", {}):
                            answer["content"][PROBLEM_MEDIA_TYPE] = answer["content"].pop("application/json")
        return schema


def create_app(
    *,
    title: str,
    description: str,
    token: str | Keyring,
    routers: Sequence[APIRouter],
    readiness: Readiness,
    registry: CollectorRegistry | None = None,
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """An application that serves `routers` to callers whose token has the scope that each route declares.

    `token` is a keyring, or one secret with every scope. Raises `ValueError` for a route without a scope.
    """
    app = _Application(
        title=title,
        description=description,
        version=__version__,
        lifespan=lifespan,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.keyring = Keyring.of(token)
    app.include_router(_operations(readiness, registry or CollectorRegistry()))
    for router in routers:
        check_scoped(router)
        app.include_router(router, responses=_PROBLEM_ANSWERS)
    app.middleware("http")(_trace)
    app.add_exception_handler(PracticumError, _on_practicum_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unforeseen)
    return app


def _operations(readiness: Readiness, registry: CollectorRegistry) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/healthz", summary="The process lives")
    async def healthz() -> dict[str, str]:
        """Asks nothing of anyone: a busy service answers too."""
        return {"status": "ok"}

    @router.get("/readyz", summary="Every dependency answers", responses={503: _PROBLEM_ANSWERS[503]})
    async def readyz() -> dict[str, str]:
        """The dependencies by name. 503 names those that fail."""

        async def ask(check: Callable[[], Awaitable[None]]) -> str:
            try:
                async with asyncio.timeout(READINESS_TIMEOUT_S):
                    await check()
            # A readiness probe reports whatever its dependency raised.
            except Exception as error:  # noqa: BLE001 — the edge answers every error
                return str(error) or type(error).__name__
            return "ok"

        answers = await asyncio.gather(*(ask(check) for check in readiness.values()))
        states = dict(zip(readiness, answers, strict=True))
        broken = {name: state for name, state in states.items() if state != "ok"}
        if broken:
            raise RpcUnavailable("; ".join(f"{name}: {state}" for name, state in broken.items()))
        return states

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses={200: {"description": "The text format.", "content": {"text/plain": {}}}},
    )
    async def metrics() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _trace(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    trace_id = _trace_id_of(request.headers.get("traceparent", "")) or uuid.uuid4().hex
    request.state.trace_id = trace_id
    with structlog.contextvars.bound_contextvars(trace_id=trace_id):
        response = await call_next(request)
    response.headers["X-Trace-Id"] = trace_id
    return response


def _trace_id_of(traceparent: str) -> str:
    parts = traceparent.split("-")
    return parts[1] if len(parts) == 4 and len(parts[1]) == 32 else ""


def _problem(
    request: Request,
    *,
    status: int,
    code: str,
    detail: str,
    errors: list[FieldProblem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = Problem(
        title=_TITLES.get(status, "Error"),
        status=status,
        detail=detail,
        code=code,
        trace_id=getattr(request.state, "trace_id", ""),
        errors=errors or [],
    )
    return problem_response(problem, headers or {})


async def _on_practicum_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PracticumError)
    status = _STATUS_BY_CODE.get(error.code, 500)
    errors = (
        [FieldProblem(field=error.field, message=error.message)] if isinstance(error, InvalidInput) else []
    )
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 403:
        headers["WWW-Authenticate"] = 'Bearer error="insufficient_scope"'
    if status == 500:
        log.error("rest.failed", path=request.url.path, exc_info=error)
    return _problem(
        request, status=status, code=error.code, detail=str(error), errors=errors, headers=headers
    )


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldProblem(field=_field_path(item["loc"]), message=str(item["msg"])) for item in error.errors()
    ]
    detail = "; ".join(f"{item.field}: {item.message}" for item in errors[:3])
    return _problem(request, status=422, code=InvalidInput.code, detail=detail, errors=errors)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(
        request,
        status=error.status_code,
        code=_TITLES.get(error.status_code, "error").lower().replace(" ", "_"),
        detail=str(error.detail),
        headers=error.headers,
    )


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    # Called from outside of the request's log context, so what it would say is said here.
    context = {name: getattr(request.state, name, "") for name in ("trace_id", "caller")}
    log.error("rest.failed", path=request.url.path, exc_info=error, **context)
    # The text of an unforeseen error stays in our log: it may name what a caller must not see.
    return _problem(request, status=500, code="internal", detail="internal error; see the service's log")


def _field_path(location: Sequence[str | int]) -> str:
    parts = location[1:] if location and location[0] in ("body", "query", "path", "header") else location
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
    return path or "body"
