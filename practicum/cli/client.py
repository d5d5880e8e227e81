"""The REST client of the command line: one class over the three services, errors made readable."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from practicum.cli.stack import StackAddresses
from practicum.errors import PracticumError

CALL_TIMEOUT_S = 120.0
POLL_S = 0.5
AWAY_PATIENCE_S = 90.0

Json = dict[str, Any]


class RequestRefused(PracticumError):
    """A service answered with an error; the message is the service's own."""

    code = "request_refused"

    def __init__(self, status: int, problem: Json) -> None:
        super().__init__(str(problem.get("detail") or problem.get("title") or f"HTTP {status}"))
        self.status = status
        self.problem = problem


class ServiceAway(PracticumError):
    """A service could not be reached, or takes no request now; it may be restarting."""

    code = "service_away"


class PlatformClient:
    """Calls rollout, reward and trainer at their addresses."""

    def __init__(self, addresses: StackAddresses, http: httpx.AsyncClient) -> None:
        self._addresses = addresses
        self._http = http

    async def rollout(self, method: str, path: str, body: Json | None = None, **query: Any) -> Json:
        """One call to the rollout service."""
        return await self._call(self._addresses.rollout_url, method, path, body, query)

    async def reward(self, method: str, path: str, body: Json | None = None, **query: Any) -> Json:
        """One call to the reward service."""
        return await self._call(self._addresses.reward_url, method, path, body, query)

    async def trainer(self, method: str, path: str, body: Json | None = None, **query: Any) -> Json:
        """One call to the trainer service."""
        return await self._call(self._addresses.trainer_url, method, path, body, query)

    async def metrics(self, url: str) -> dict[str, float]:
        """Every sample of a service's `/metrics`, by its name with labels."""
        answer = await self._http.get(url + "/metrics")
        lines = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def _call(self, base: str, method: str, path: str, body: Json | None, query: Json) -> Json:
        try:
            answer = await self._http.request(method, base + path, json=body, params=query)
        except httpx.HTTPError as error:
            raise ServiceAway(f"{method} {base}{path}: {str(error) or type(error).__name__}") from error
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise ServiceAway(f"{method} {base}{path}: {answer.text[:500]}")
        if answer.is_error:
            try:
                problem = answer.json()
            except ValueError:
                problem = {"detail": answer.text[:500]}
            raise RequestRefused(answer.status_code, problem)
        parsed: Json = answer.json()
        return parsed


@asynccontextmanager
async def connect_platform(addresses: StackAddresses) -> AsyncIterator[PlatformClient]:
    """A client for the length of a block."""
    headers = {"Authorization": f"Bearer {addresses.token}"}
    async with httpx.AsyncClient(headers=headers, timeout=CALL_TIMEOUT_S) as http:
        yield PlatformClient(addresses, http)


async def poll_until(
    ask: Callable[[], Any],
    is_done: Callable[[Json], bool],
    on_answer: Callable[[Json], None],
    *,
    away_patience_s: float = AWAY_PATIENCE_S,
) -> Json:
    """Ask again until the answer is done; `on_answer` sees every answer.

    A service that is restarting is waited for; `ServiceAway` once it was away for `away_patience_s`.
    """
    loop = asyncio.get_running_loop()
    answered_s = loop.time()
    while True:
        try:
            answer: Json = await ask()
        except ServiceAway:
            if loop.time() - answered_s > away_patience_s:
                raise
        else:
            answered_s = loop.time()
            on_answer(answer)
            if is_done(answer):
                return answer
        await asyncio.sleep(POLL_S)
