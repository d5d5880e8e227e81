"""What the trainer counts for Prometheus. Ids never become labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class TrainerMetrics:
    """The trainer's counters in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter(
            "practicum_trainer_steps",
            "Steps committed, by whether the weights moved.",
            ["updated"],
            registry=registry,
        )
        self.step_seconds = Histogram(
            "practicum_trainer_step_seconds",
            "Seconds of compute a step.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.wait_seconds = Histogram(
            "practicum_trainer_wait_seconds",
            "Seconds a step waited for its groups.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.commit_seconds = Histogram(
            "practicum_trainer_commit_seconds",
            "Seconds to write a checkpoint and commit its step.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.publish_seconds = Histogram(
            "practicum_trainer_publish_seconds",
            "Seconds until every engine served a version.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.publishes = Counter(
            "practicum_trainer_publishes", "Tries to publish, by result.", ["result"], registry=registry
        )
        self.tokens_trained = Counter(
            "practicum_trainer_tokens_trained", "Tokens in the loss of committed steps.", registry=registry
        )
        self.trajectories = Counter(
            "practicum_trainer_trajectories",
            "Arrivals, by what became of them.",
            ["result"],
            registry=registry,
        )
        self.quarantined = Counter(
            "practicum_trainer_quarantined",
            "Trajectories set aside, by reason.",
            ["reason"],
            registry=registry,
        )
        self.checkpoint_bytes = Gauge(
            "practicum_trainer_checkpoint_bytes", "Size of the newest checkpoint.", registry=registry
        )
