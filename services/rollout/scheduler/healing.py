"""Puts a running run's weights on the engines where nobody else does.

The trainer publishes its versions itself. After a restart of this service or of an engine the engines may
serve something else, and the trainer has no reason to publish again; then the newest committed checkpoint
is asked for and loaded. Never done for a version that the engines' probes refused.
"""

from collections.abc import Sequence

from practicum.clock import Clock
from practicum.errors import NotFound, PracticumError
from practicum.telemetry.logs import get_logger
from services.rollout.engine.pool import EnginePool
from services.rollout.engine.weights import Publication, WeightPublisher
from services.rollout.scheduler.runs import Run, Trainer

log = get_logger("rollout.healing")

# A run that is behind what the engines serve: (run, served run, served version). Where the served version
# moves, somebody is at work, and the patience begins again.
_Lag = tuple[str, str, int]


class WeightHealer:
    """Watches that running runs have their weights served."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        pool: EnginePool,
        publisher: WeightPublisher,
        clock: Clock,
        patience_s: float,
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._publisher = publisher
        self._clock = clock
        self._patience_s = patience_s
        self._behind_since_s: dict[_Lag, float] = {}

    async def look_after(self, runs: Sequence[Run]) -> None:
        """Called at every look at the running runs; loads weights that were missing for long."""
        serving = self._pool.serving
        if serving is None:
            return
        run_ids = {run.run_id for run in runs}
        late: list[Run] = []
        behind_since_s: dict[_Lag, float] = {}
        now_s = self._clock.monotonic()
        for run in runs:
            if serving.run_id == run.run_id:
                is_fine = serving.weight_version >= run.weight_version
            else:
                is_fine = serving.run_id in run_ids  # another run has the engines; two cannot share them
            if is_fine:
                continue
            lag = (run.run_id, serving.run_id, serving.weight_version)
            behind_since_s[lag] = self._behind_since_s.get(lag, now_s)
            if now_s - behind_since_s[lag] >= self._patience_s:
                behind_since_s[lag] = now_s
                late.append(run)
        self._behind_since_s = behind_since_s
        for run in late:
            await self._heal(run)

    async def _heal(self, run: Run) -> None:
        try:
            found = await self._trainer.checkpoint(run.run_id)
        except NotFound:
            return
        if await self._publisher.is_refused(found.run_id, found.weight_version):
            return
        log.warning("weights.healing", run_id=run.run_id, weight_version=found.weight_version)
        try:
            await self._publisher.publish(
                Publication(
                    run_id=found.run_id,
                    weight_version=found.weight_version,
                    path=found.path,
                    manifest_sha256=found.manifest_sha256,
                    rollback=True,
                )
            )
        except PracticumError as error:
            log.error("weights.healing_failed", run_id=run.run_id, error=str(error))
