"""The command line's client: a service that restarts is waited for, one that refuses is not."""

import pytest

from practicum.cli.client import Json, RequestRefused, ServiceAway, poll_until


async def test_poll_when_the_service_is_away_for_a_moment_goes_on() -> None:
    answers: list[Json | Exception] = [{"n": 1}, ServiceAway("restarting"), {"n": 2}]
    seen: list[int] = []

    async def ask() -> Json:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    last = await poll_until(ask, lambda answer: answer["n"] == 2, lambda answer: seen.append(answer["n"]))
    assert (last, seen) == ({"n": 2}, [1, 2])


async def test_poll_when_the_service_stays_away_gives_up() -> None:
    async def ask() -> Json:
        raise ServiceAway("gone")

    with pytest.raises(ServiceAway, match="gone"):
        await poll_until(ask, lambda _: True, lambda _: None, away_patience_s=0.0)


async def test_poll_when_the_request_is_refused_raises_at_once() -> None:
    async def ask() -> Json:
        raise RequestRefused(404, {"detail": "no such run"})

    with pytest.raises(RequestRefused, match="no such run"):
        await poll_until(ask, lambda _: True, lambda _: None)
