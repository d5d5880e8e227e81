"""What each active run is doing right now, for people who ask; never the truth about anything."""

from dataclasses import dataclass, replace
from enum import StrEnum

from practicum.clock import Clock


class Phase(StrEnum):
    """What a run is doing."""

    LOADING = "loading"
    WAITING = "waiting_for_groups"
    TRAINING = "training"
    COMMITTING = "committing"
    PUBLISHING = "publishing"
    RETRYING = "retrying"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One moment of a run."""

    phase: Phase
    since_s: float  # on the clock's monotonic scale
    groups_complete: int = 0
    groups_partial: int = 0
    groups_needed: int = 0
    problem: str = ""  # what it waits out, for example a full disk


class ProgressBoard:
    """The activities by run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_run: dict[str, Activity] = {}

    def enter(self, run_id: str, phase: Phase, *, problem: str = "") -> None:
        """Say that a run is now in `phase`; staying in one keeps its start."""
        present = self._by_run.get(run_id)
        if present is not None and present.phase is phase:
            self._by_run[run_id] = replace(present, problem=problem)
        else:
            self._by_run[run_id] = Activity(phase=phase, since_s=self._clock.monotonic(), problem=problem)

    def count_groups(self, run_id: str, *, complete: int, partial: int, needed: int) -> None:
        """Say how far the groups of the next step are."""
        present = self._by_run.get(run_id)
        if present is not None:
            self._by_run[run_id] = replace(
                present, groups_complete=complete, groups_partial=partial, groups_needed=needed
            )

    def leave(self, run_id: str) -> None:
        """The run is not active any more."""
        self._by_run.pop(run_id, None)

    def keep_only(self, run_id: str | None) -> None:
        """Only this run holds the trainer; None = no run does."""
        for other in [held for held in self._by_run if held != run_id]:
            self.leave(other)

    def activity(self, run_id: str) -> tuple[Activity, float] | None:
        """What a run does and for how many seconds; None where it is not active."""
        activity = self._by_run.get(run_id)
        return None if activity is None else (activity, self._clock.monotonic() - activity.since_s)
