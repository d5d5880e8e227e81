"""How busy an engine's slots are: generating slot seconds over slots times seconds."""

from dataclasses import dataclass

from practicum.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Totals since the meter was made."""

    busy_slot_seconds: float
    slots: int
    seconds: float
    tokens_generated: int
    paused_seconds: float

    @property
    def utilisation(self) -> float:
        """Share of slot time spent generating, in [0, 1]."""
        available = self.slots * self.seconds
        return self.busy_slot_seconds / available if available > 0 else 0.0

    def since(self, earlier: "Usage") -> "Usage":
        """What happened between two readings."""
        return Usage(
            busy_slot_seconds=self.busy_slot_seconds - earlier.busy_slot_seconds,
            slots=self.slots,
            seconds=self.seconds - earlier.seconds,
            tokens_generated=self.tokens_generated - earlier.tokens_generated,
            paused_seconds=self.paused_seconds - earlier.paused_seconds,
        )


class SlotMeter:
    """Integrates the number of requests at one engine over time; a paused engine generates nothing."""

    def __init__(self, *, slots: int, clock: Clock) -> None:
        self.num_in_flight = 0
        self._slots = slots
        self._clock = clock
        self._started_at_s = clock.monotonic()
        self._last_s = self._started_at_s
        self._is_paused = False
        self._busy_slot_seconds = 0.0
        self._paused_seconds = 0.0
        self._tokens_generated = 0

    def enter(self) -> None:
        """A request took a slot."""
        self._advance()
        self.num_in_flight += 1

    def leave(self, num_tokens: int) -> None:
        """A request gave its slot back, with the tokens it sampled."""
        self._advance()
        self.num_in_flight -= 1
        self._tokens_generated += num_tokens

    def set_paused(self, paused: bool) -> None:
        """The engine stopped or resumed generating."""
        self._advance()
        self._is_paused = paused

    def read(self) -> Usage:
        """Totals up to now."""
        self._advance()
        return Usage(
            busy_slot_seconds=self._busy_slot_seconds,
            slots=self._slots,
            seconds=self._last_s - self._started_at_s,
            tokens_generated=self._tokens_generated,
            paused_seconds=self._paused_seconds,
        )

    def _advance(self) -> None:
        now_s = self._clock.monotonic()
        passed_s = now_s - self._last_s
        self._last_s = now_s
        if self._is_paused:
            self._paused_seconds += passed_s
        else:
            self._busy_slot_seconds += passed_s * min(self.num_in_flight, self._slots)
