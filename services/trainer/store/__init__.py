"""What the trainer knows for sure: runs, steps, consumed trajectories, checkpoints, quarantine."""

from dataclasses import dataclass

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.clock import Clock
from practicum.db.engine import create_engine
from services.trainer.store.checkpoints import CheckpointStore
from services.trainer.store.quarantine import QuarantineStore
from services.trainer.store.runs import RunStore

MIGRATIONS = "services.trainer.store:migrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStore:
    """The trainer's tables."""

    engine: AsyncEngine
    runs: RunStore
    checkpoints: CheckpointStore
    quarantine: QuarantineStore


def open_store(url: str, clock: Clock) -> TrainerStore:
    """The store behind a database URL, whose schema is current; close its engine when done."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        # An acknowledged entry is gone for good, so the step that consumed it must outlive a power cut.
        event.listen(engine.sync_engine, "connect", _sync_every_commit)
    return TrainerStore(
        engine=engine,
        runs=RunStore(engine, clock),
        checkpoints=CheckpointStore(engine, clock),
        quarantine=QuarantineStore(engine),
    )


def _sync_every_commit(connection: object, _record: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
