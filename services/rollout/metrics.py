"""What the rollout service counts. Ids never become labels."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from practicum.trajectory import Trajectory
from services.rollout.engine.pool import EnginePool

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The service's counters, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "practicum_rollout"
        self.in_flight = Gauge(f"{name}_episodes_in_flight", "Attempts being played.", registry=registry)
        self.episodes = Counter(
            f"{name}_attempts", "Attempts that ended, by outcome.", ["outcome"], registry=registry
        )
        self.episode_seconds = Histogram(
            f"{name}_episode_seconds", "Wall time of an attempt.", buckets=_SECONDS, registry=registry
        )
        self.turn_seconds = Histogram(
            f"{name}_turn_generation_seconds", "Engine time of a turn.", buckets=_SECONDS, registry=registry
        )
        self.tool_seconds = Histogram(
            f"{name}_turn_tools_seconds", "Tool time of a turn.", buckets=_SECONDS, registry=registry
        )
        self.slot_wait_seconds = Histogram(
            f"{name}_slot_wait_seconds", "Wait for an engine slot.", buckets=_SECONDS, registry=registry
        )
        self.retries = Counter(
            f"{name}_retries", "Attempts that began after a platform failure.", registry=registry
        )
        self.grades = Counter(f"{name}_grades_received", "Grades taken from the events.", registry=registry)
        self.republished = Counter(
            f"{name}_republished", "Messages sent again by the reconciler.", registry=registry
        )
        self.errors = Counter(
            f"{name}_errors", "Unforeseen errors that a worker survived.", ["worker"], registry=registry
        )

    def observe(self, trajectory: Trajectory, seconds: float) -> None:
        """Count one ended attempt."""
        self.episodes.labels(trajectory.outcome).inc()
        self.episode_seconds.observe(seconds)
        for turn in trajectory.turns:
            self.turn_seconds.observe(turn.generation_s)
            self.tool_seconds.observe(turn.tools_s)
            self.slot_wait_seconds.observe(turn.waiting_s)


class EngineCollector(Collector):
    """Engine figures, read from the pool when they are asked for."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        """One sample an engine."""
        name = "practicum_rollout_engine"
        busy = CounterMetricFamily(f"{name}_busy_slot_seconds", "Generating slots.", labels=["engine"])
        slots = GaugeMetricFamily(f"{name}_slots", "Requests it takes at once.", labels=["engine"])
        tokens = CounterMetricFamily(f"{name}_tokens_generated", "Sampled tokens.", labels=["engine"])
        routable = GaugeMetricFamily(f"{name}_in_routing", "1 where it gets requests.", labels=["engine"])
        version = GaugeMetricFamily(f"{name}_weight_version", "What it serves.", labels=["engine"])
        for engine in self._pool.engines:
            usage = engine.meter.read()
            labels = [engine.engine_id]
            busy.add_metric(labels, usage.busy_slot_seconds)
            slots.add_metric(labels, usage.slots)
            tokens.add_metric(labels, usage.tokens_generated)
            routable.add_metric(labels, float(engine.is_routable))
            version.add_metric(labels, engine.weight_version)
        return [busy, slots, tokens, routable, version]
