"""The door of every REST route: which scope it needs, declared at the route and checked before it runs.

    router = APIRouter(prefix="/v1/runs", route_class=ScopedRoute)

    @router.post("", dependencies=[needs(Scope.OPERATE)])

A dependency alone would run after FastAPI has read and parsed the body, so the route itself asks:
whoever may not come in has no body read, and learns nothing of what the route expects.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from fastapi import APIRouter, Request, Response, Security
from fastapi.params import Security as SecurityParam
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from practicum.auth.keyring import Keyring
from practicum.auth.scopes import Scope
from practicum.errors import Forbidden, Unauthorized
from practicum.telemetry.logs import get_logger

log = get_logger("practicum.rest")

_BEARER = HTTPBearer(
    auto_error=False, description="A token with the scope that the operation names, or one that includes it."
)


def needs(scope: Scope) -> Any:
    """The declaration of a route's scope, which OpenAPI shows as the operation's security requirement."""
    return Security(_BEARER, scopes=[str(scope)])


class ScopedRoute(APIRoute):
    """A route that lets in only callers whose token has its scope; `ValueError` where none is declared."""

    @property
    def needed_scope(self) -> Scope:
        """The scope that a caller needs."""
        scopes = [
            scope
            for dependency in self.dependencies
            if isinstance(dependency, SecurityParam) and dependency.dependency is _BEARER
            for scope in dependency.scopes or ()
        ]
        if len(scopes) != 1:
            raise ValueError(f"{self.path}: declare one scope, as dependencies=[needs(Scope.…)]")
        return Scope(scopes[0])

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the check."""
        handle, needed = super().get_route_handler(), self.needed_scope

        async def guarded(request: Request) -> Response:
            keyring: Keyring = request.app.state.keyring
            try:
                caller = keyring.identify(request.headers.getlist("authorization"))
                # A request has a task of its own, so this ends with it.
                structlog.contextvars.bind_contextvars(caller=caller.name)
                request.state.caller = caller.name
                caller.require(needed)
            except (Unauthorized, Forbidden) as error:
                log.info("rest.refused", path=request.url.path, code=error.code, reason=str(error))
                raise
            return await handle(request)

        return guarded


def check_scoped(router: APIRouter) -> None:
    """Raises `ValueError` for a router with a route that no scope guards."""
    for route in router.routes:
        if not isinstance(route, ScopedRoute):
            raise ValueError(
                f"{getattr(route, 'path', route)}: is no ScopedRoute; give its router route_class"
            )
