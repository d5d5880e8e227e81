"""The reward service's metrics. Ids never become labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_GRADE_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class RewardMetrics:
    """Counters of one process, in the registry it was given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.grades = Counter("practicum_reward_grades", "Grades by outcome.", ["outcome"], registry=registry)
        self.grade_seconds = Histogram(
            "practicum_reward_grade_seconds",
            "Wall time of one grading.",
            buckets=_GRADE_BUCKETS_S,
            registry=registry,
        )
        self.open_sessions = Gauge(
            "practicum_reward_open_sessions", "Sandbox sessions of episodes now.", registry=registry
        )
        self.tool_calls = Counter(
            "practicum_reward_tool_calls",
            "Tool calls by tool and limit hit.",
            ["tool", "limit"],
            registry=registry,
        )
