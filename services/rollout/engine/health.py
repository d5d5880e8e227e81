"""When an engine leaves routing and when it returns: a single missed probe changes nothing.

An engine leaves after three failures in a row and returns after two successes in a row. A busy engine
that misses one probe keeps its work; work in flight at an engine that left is never failed by this gate,
only by its own deadline. An engine that refuses connections is gone and leaves at once.
"""

FAILURES_TO_LEAVE = 3
SUCCESSES_TO_RETURN = 2


class HealthGate:
    """The hysteresis of one engine; starts outside."""

    def __init__(self) -> None:
        self.is_open = False
        self._streak = 0  # results in a row that speak against the present state

    def close(self) -> None:
        """Take the engine out at once; it returns like any other."""
        self.is_open = False
        self._streak = 0

    def record(self, healthy: bool) -> bool:
        """Take one probe's result; True where the gate changed."""
        if healthy == self.is_open:
            self._streak = 0
            return False
        self._streak += 1
        if self._streak < (FAILURES_TO_LEAVE if self.is_open else SUCCESSES_TO_RETURN):
            return False
        self.is_open = healthy
        self._streak = 0
        return True
