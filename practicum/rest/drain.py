"""What a REST edge answers while its service drains: 503, and when to come again.

Wrapped around the whole application, so that no route can forget it. `/healthz` and `/metrics` are
answered as ever: the process lives, and what it still does is worth seeing. Requests that came before
are left alone.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from practicum.rest.models import Problem, problem_response

RETRY_AFTER_S = 2
_STILL_ANSWERED = ("/healthz", "/metrics")


class Draining:
    """An application that refuses what is new once `begin` was called."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._has_begun = False

    def begin(self) -> None:
        """Refuse from now on."""
        self._has_begun = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if not self._has_begun or scope["type"] != "http" or scope["path"] in _STILL_ANSWERED:
            await self._app(scope, receive, send)
            return
        problem = Problem(
            title="Draining",
            status=503,
            detail="draining: the service stops; ask again, and another or the next one answers",
            code="unavailable",
            trace_id="",
        )
        # A load balancer must not keep sending here over a connection that it holds.
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
        await problem_response(problem, headers)(scope, receive, send)
