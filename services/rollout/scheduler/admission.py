"""Has waiting tasks checked by the reward service, a bounded number at once."""

import asyncio

from practicum.errors import InvalidInput, PracticumError
from practicum.telemetry.logs import get_logger
from services.rollout.metrics import Metrics
from services.rollout.pauses import pause
from services.rollout.rpc.sandboxes import Admissions
from services.rollout.store.suites import SuiteStore
from services.rollout.tasks import Task

log = get_logger("rollout.admission")

_POLL_S = 1.0
_FAILURE_WAIT_S = 2.0


class Admitter:
    """The worker that gives tasks their verdict. A platform failure leaves a task waiting."""

    def __init__(
        self, *, store: SuiteStore, admissions: Admissions, metrics: Metrics, num_at_once: int
    ) -> None:
        self._store = store
        self._admissions = admissions
        self._metrics = metrics
        self._num_at_once = num_at_once
        self.wake = asyncio.Event()  # set when tasks were stored

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`."""
        while not stop.is_set():
            try:
                num_failed = await self.round()
            except Exception:
                log.exception("admission.failed")
                self._metrics.errors.labels("admission").inc()
                num_failed = 1
            if num_failed:
                await pause(stop, _FAILURE_WAIT_S)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self.wake.wait()
            except TimeoutError:
                continue
            self.wake.clear()

    async def round(self) -> int:
        """Check waiting tasks until none is left or the platform fails; the number of failures."""
        num_failed = 0
        while not num_failed and (tasks := await self._store.admitting(limit=self._num_at_once)):
            async with asyncio.TaskGroup() as group:
                checks = [group.create_task(self._check(task)) for task in tasks]
            num_failed = sum(not check.result() for check in checks)
        return num_failed

    async def _check(self, task: Task) -> bool:
        try:
            verdict = await self._admissions.admit(task)
        except InvalidInput as error:
            reason = {"name": error.field, "ok": False, "detail": error.message}
            await self._store.set_verdict(task.task_id, admitted=False, reasons=[reason])
            return True
        except PracticumError as error:
            log.warning("admission.no_verdict", task_id=task.task_id, error=str(error))
            return False
        await self._store.set_verdict(task.task_id, admitted=verdict.admitted, reasons=verdict.reasons)
        if not verdict.admitted:
            log.info("task.rejected", task_id=task.task_id, reasons=verdict.reasons)
        return True
