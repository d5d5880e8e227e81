"""Has waiting tasks checked by the reward service, a bounded number at once.

A task that gets no verdict never holds up those behind it: each round asks for the tasks that failed least
first, a slot that is free takes the next one, and a failed task waits longer each time before its next try.

Two kinds of failure are told apart. Where the reward service broke on the task (no clean room, no grade, no
answer in time) the try is charged, and after `MAX_TRIES` the task is rejected with the error as its reason:
a suite is ready only when every task has its verdict, so a task that is put off for ever would hold up its
suite for ever. The waits spread the tries over some minutes, so that a short fault costs no task. Where the
service is away, full or refuses us, that says nothing about the task: it is not charged, and waits. Tries
are kept in memory alone: a restart gives every waiting task its whole budget again.

A replica claims a task before it has it checked, and keeps it until its verdict, so that the tries are
counted in one place. The tasks of a replica that is gone are free.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from practicum.clock import Clock
from practicum.errors import InvalidInput, Overloaded, PracticumError, Unauthorized
from practicum.pauses import pause
from practicum.rpc.codes import RpcUnavailable
from practicum.telemetry.logs import get_logger
from services.rollout.metrics import Metrics
from services.rollout.rpc.sandboxes import Admissions
from services.rollout.store.suites import SuiteStore

log = get_logger("rollout.admission")

CHARGED_WAITS_S = (2.0, 10.0, 60.0, 240.0)  # after the first charged failure, the second, …
MAX_TRIES = len(CHARGED_WAITS_S) + 1
_POLL_S = 1.0
_AWAY_WAIT_S = 2.0
_LONGEST_AWAY_WAIT_S = 60.0


class _PlatformAway(Exception):
    """The reward service takes no admission now, whatever the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tries:
    """A waiting task's failures so far."""

    num_charged: int = 0
    num_away: int = 0
    next_at_s: float = 0.0  # on the monotonic clock

    @property
    def number(self) -> int:
        return self.num_charged + self.num_away


_UNTRIED = _Tries()


class Admitter:
    """The worker that gives tasks their verdict."""

    def __init__(
        self,
        *,
        store: SuiteStore,
        admissions: Admissions,
        metrics: Metrics,
        clock: Clock,
        instance: str,
        num_at_once: int,
    ) -> None:
        self._store = store
        self._admissions = admissions
        self._metrics = metrics
        self._clock = clock
        self._instance = instance
        self._num_at_once = num_at_once
        self._tries: dict[str, _Tries] = {}
        self.wake = asyncio.Event()  # set when tasks were stored

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`. A check in flight is dropped then: its task waits for the next start."""
        while not stop.is_set():
            try:
                is_away = not await self.round(stop)
            except Exception:
                log.exception("admission.failed")
                self._metrics.errors.labels("admission").inc()
                is_away = True
            if is_away:
                await pause(stop, _AWAY_WAIT_S)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self.wake.wait()
            except TimeoutError:
                continue
            self.wake.clear()

    async def round(self, stop: asyncio.Event) -> bool:
        """Ask once for every waiting task that is due, or less at `stop`; False where the service is away."""
        due = iter(self._due(await self._store.admitting_ids(self._instance)))
        async with asyncio.TaskGroup() as group:
            slots = [group.create_task(self._work(due)) for _ in range(self._num_at_once)]
            watch = group.create_task(_cancel_at(stop, slots))
            await asyncio.wait(slots)
            watch.cancel()
        return all(slot.cancelled() or slot.result() for slot in slots)

    def _due(self, waiting: Sequence[str]) -> list[str]:
        self._tries = {task_id: self._tries[task_id] for task_id in waiting if task_id in self._tries}
        now_s = self._clock.monotonic()
        due = [task_id for task_id in waiting if self._tries_of(task_id).next_at_s <= now_s]
        return sorted(due, key=lambda task_id: self._tries_of(task_id).number)  # stable: else oldest first

    def _tries_of(self, task_id: str) -> _Tries:
        return self._tries.get(task_id, _UNTRIED)

    async def _work(self, due: Iterator[str]) -> bool:
        """One slot: the next due task, until none is left (True) or the service is away (False)."""
        for task_id in due:
            try:
                await self._check(task_id)
            except _PlatformAway:
                for _ in due:  # the other slots end with what they hold
                    pass
                return False
            # Whatever breaks on one task is that task's failure, not that of those behind it.
            except Exception as error:
                log.exception("admission.failed", task_id=task_id)
                self._metrics.errors.labels("admission").inc()
                await self._charge(task_id, f"{type(error).__name__} in the rollout service; see its log")
        return True

    async def _check(self, task_id: str) -> None:
        task = await self._store.claim_check(task_id, self._instance)
        if task is None:
            return  # another replica has it checked, or gave its verdict
        try:
            verdict = await self._admissions.admit(task)
        except InvalidInput as error:
            await self._reject(task_id, error.field, error.message)
        except (RpcUnavailable, Overloaded, Unauthorized) as error:
            self._put_off(task_id)
            log.warning("admission.away", task_id=task_id, error=str(error))
            raise _PlatformAway from error
        except PracticumError as error:
            await self._charge(task_id, f"{error.code}: {error}")
        else:
            await self._store.set_verdict(task_id, admitted=verdict.admitted, reasons=verdict.reasons)
            if not verdict.admitted:
                log.info("task.rejected", task_id=task_id, reasons=verdict.reasons)

    async def _charge(self, task_id: str, error: str) -> None:
        """Count a failure against the task's budget; reject it where that is used up."""
        tries = self._tries_of(task_id)
        num_charged = tries.num_charged + 1
        log.warning("admission.no_verdict", task_id=task_id, num_tries=num_charged, error=error)
        # Noted before the rejection is stored: where SQL is away as well, the task is not asked at once.
        wait_s = CHARGED_WAITS_S[min(num_charged, len(CHARGED_WAITS_S)) - 1]
        self._tries[task_id] = replace(
            tries, num_charged=num_charged, next_at_s=self._clock.monotonic() + wait_s
        )
        if num_charged >= MAX_TRIES:
            await self._reject(
                task_id, "platform", f"no verdict after {num_charged} tries; the last failed with {error}"
            )

    def _put_off(self, task_id: str) -> None:
        """The service was away: the task waits, and is asked for after those that were not tried."""
        tries = self._tries_of(task_id)
        wait_s = min(_AWAY_WAIT_S * 2.0 ** min(tries.num_away, 10), _LONGEST_AWAY_WAIT_S)
        self._tries[task_id] = replace(
            tries, num_away=tries.num_away + 1, next_at_s=self._clock.monotonic() + wait_s
        )

    async def _reject(self, task_id: str, name: str, detail: str) -> None:
        reason = {"name": name, "ok": False, "detail": detail}
        await self._store.set_verdict(task_id, admitted=False, reasons=[reason])
        log.info("task.rejected", task_id=task_id, reasons=[reason])


async def _cancel_at(stop: asyncio.Event, slots: Sequence[asyncio.Task[bool]]) -> None:
    await stop.wait()
    for slot in slots:
        slot.cancel()
