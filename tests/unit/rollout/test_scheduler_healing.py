"""When missing weights are loaded, and when somebody else is at it."""

from services.rollout.engine.labels import LabelBook
from services.rollout.engine.pool import EnginePool
from services.rollout.engine.records import Load, Serving
from services.rollout.engine.weights import Publication, PublishReport, WeightPublisher
from services.rollout.scheduler.healing import WeightHealer
from services.rollout.scheduler.runs import PublishedCheckpoint
from tests.fixtures.rollout import ManualClock, ScriptedTrainer, make_run


class Recorder(WeightPublisher):
    """Keeps what it was asked to publish."""

    def __init__(self) -> None:
        self.refused: set[tuple[str, int]] = set()
        self.published: list[Publication] = []

    async def is_refused(self, run_id: str, weight_version: int) -> bool:
        return (run_id, weight_version) in self.refused

    async def publish(self, publication: Publication) -> PublishReport:
        self.published.append(publication)
        return PublishReport(ok=True, engines=(), weight_version=publication.weight_version)


async def find(label: str) -> Load | None:
    return None


def serving_of(version: int, run_id: str = "run_1") -> Serving:
    return Serving(run_id=run_id, weight_version=version, path=f"/models/v{version}")


async def test_healing_when_versions_move_waits_and_when_they_stand_still_loads() -> None:
    clock, trainer, publisher = ManualClock(), ScriptedTrainer(), Recorder()
    pool = EnginePool([], labels=LabelBook(find, clock=clock), clock=clock)
    trainer.checkpoints["run_1"] = PublishedCheckpoint(
        run_id="run_1", weight_version=9, path="/models/v9", manifest_sha256=""
    )
    healer = WeightHealer(trainer=trainer, pool=pool, publisher=publisher, clock=clock, patience_s=15)
    for version in range(8):  # always one behind, never standing still
        pool.serving = serving_of(version)
        for _ in range(2):
            await healer.look_after([make_run(weight_version=version + 1)])
            clock.now_s += 5
    assert publisher.published == []
    for _ in range(4):
        await healer.look_after([make_run(weight_version=8)])
        clock.now_s += 5
    assert [publication.weight_version for publication in publisher.published] == [9]


async def test_healing_when_the_run_was_fine_between_begins_its_patience_again() -> None:
    clock, trainer, publisher = ManualClock(), ScriptedTrainer(), Recorder()
    pool = EnginePool([], labels=LabelBook(find, clock=clock), clock=clock)
    pool.serving = serving_of(3)
    healer = WeightHealer(trainer=trainer, pool=pool, publisher=publisher, clock=clock, patience_s=15)
    for version in (4, 4, 3, 4, 4):
        await healer.look_after([make_run(weight_version=version)])
        clock.now_s += 7
    assert publisher.published == []
