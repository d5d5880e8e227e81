"""Groups as they fill up: the assembler, in memory only.

The stream and SQL are the truth; this is rebuilt from them after a restart. Invariants:
- a group is complete when `group_size` distinct episodes have arrived, trainable or not;
- complete groups leave in the order in which they were completed;
- of one episode only the newest attempt is held, and an episode that a committed step consumed is
  never held again;
- every entry id given to `add` comes back exactly once: from `add` (to be acknowledged at once) or
  with its group.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from practicum.errors import IntakeError
from practicum.trajectory import Trajectory


class Admission(StrEnum):
    """What became of an arrival."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the same attempt again
    SUPERSEDED = "superseded"  # another attempt is held and newer, or was trained already
    CONSUMED = "consumed"  # this very attempt was part of a committed step


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One trajectory at its place in a group."""

    trajectory: Trajectory
    entry_ids: tuple[str, ...]
    usable: bool  # False = fills its place, but is never trained and has no part in the baseline
    quarantined: bool = False  # True = set aside because it breaks an invariant; never usable


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A complete group."""

    group_id: str
    group_index: int
    task_id: str
    arrivals: tuple[Arrival, ...]

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """The trajectories that may be trained."""
        return tuple(arrival.trajectory for arrival in self.arrivals if arrival.usable)

    @property
    def entry_ids(self) -> tuple[str, ...]:
        """Every stream entry that the group owes an acknowledgement."""
        return tuple(entry_id for arrival in self.arrivals for entry_id in arrival.entry_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `GroupAssembler.add` decided, and the entries that may be acknowledged now."""

    admission: Admission
    released_entry_ids: tuple[str, ...] = ()


class GroupAssembler:
    """Collects arrivals of one run by group."""

    def __init__(
        self,
        group_size: int,
        *,
        consumed_attempts: Mapping[str, int] | None = None,
        consumed_groups: Collection[str] = (),
    ) -> None:
        """`consumed_attempts` and `consumed_groups` are what committed steps took, by episode and group."""
        self._group_size = group_size
        self._consumed_attempts = dict(consumed_attempts or {})
        self._consumed_groups = set(consumed_groups)
        self._open: dict[str, dict[str, Arrival]] = {}  # group id -> episode id -> arrival
        self._group_of: dict[str, str] = {}  # episode id -> id of the open group that holds it
        self._complete: list[str] = []

    @property
    def num_complete(self) -> int:
        """Groups that a step could take now."""
        return len(self._complete)

    @property
    def num_partial(self) -> int:
        """Groups that still wait for an episode."""
        return len(self._open) - len(self._complete)

    def add(self, arrival: Arrival) -> Verdict:
        """Hold an arrival, or say why not.

        Raises `IntakeError` where the group's other episodes are of another task or index, or where
        the group is already full of other episodes; nothing is held then.
        """
        trajectory = arrival.trajectory
        if trajectory.group_id in self._consumed_groups or trajectory.episode_id in self._consumed_attempts:
            taken = self._consumed_attempts.get(trajectory.episode_id)
            again = taken == trajectory.attempt
            admission = Admission.CONSUMED if again else Admission.SUPERSEDED
            return Verdict(admission=admission, released_entry_ids=arrival.entry_ids)
        held = self._open.get(trajectory.group_id, {})
        present = held.get(trajectory.episode_id)
        if present is not None and present.trajectory.attempt >= trajectory.attempt:
            return self._refuse(held, present, arrival)
        self._check_fits(held, trajectory)
        self._open.setdefault(trajectory.group_id, held)[trajectory.episode_id] = arrival
        self._group_of[trajectory.episode_id] = trajectory.group_id
        if present is None and len(held) == self._group_size:
            self._complete.append(trajectory.group_id)
        released = present.entry_ids if present is not None else ()
        return Verdict(admission=Admission.ACCEPTED, released_entry_ids=released)

    def _refuse(self, held: dict[str, Arrival], present: Arrival, arrival: Arrival) -> Verdict:
        if present.trajectory.attempt > arrival.trajectory.attempt:
            return Verdict(admission=Admission.SUPERSEDED, released_entry_ids=arrival.entry_ids)
        known = set(present.entry_ids)
        # The held entry delivered again must stay owed; another entry of the same attempt need not.
        extra = tuple(entry_id for entry_id in arrival.entry_ids if entry_id not in known)
        return Verdict(admission=Admission.DUPLICATE, released_entry_ids=extra)

    def _check_fits(self, held: dict[str, Arrival], trajectory: Trajectory) -> None:
        if self._group_of.get(trajectory.episode_id, trajectory.group_id) != trajectory.group_id:
            raise IntakeError("group_mismatch", f"episode {trajectory.episode_id} is part of another group")
        for other in held.values():
            if (other.trajectory.task_id, other.trajectory.group_index) != (
                trajectory.task_id,
                trajectory.group_index,
            ):
                raise IntakeError(
                    "group_mismatch",
                    f"group {trajectory.group_id} holds task {other.trajectory.task_id}, "
                    f"this is task {trajectory.task_id}",
                )
        if len(held) >= self._group_size and trajectory.episode_id not in held:
            raise IntakeError("group_overflow", f"group {trajectory.group_id} is already full")

    def take(self, num_groups: int) -> tuple[Group, ...]:
        """The first `num_groups` complete groups, which leave the assembler; () where fewer are there."""
        if len(self._complete) < num_groups:
            return ()
        taken, self._complete = self._complete[:num_groups], self._complete[num_groups:]
        return tuple(self._close(group_id) for group_id in taken)

    def _close(self, group_id: str) -> Group:
        held = self._open.pop(group_id)
        for episode_id in held:
            del self._group_of[episode_id]
        self._consumed_groups.add(group_id)
        self._consumed_attempts.update(
            (episode_id, arrival.trajectory.attempt) for episode_id, arrival in held.items()
        )
        # By episode, so that a step does not depend on the order of arrival within a group.
        arrivals = tuple(held[episode_id] for episode_id in sorted(held))
        first = arrivals[0].trajectory
        return Group(
            group_id=group_id,
            group_index=first.group_index,
            task_id=first.task_id,
            arrivals=arrivals,
        )

    def find(self, trajectory_id: str) -> Trajectory | None:
        """A held trajectory by its id; None where it is not held."""
        for held in self._open.values():
            for arrival in held.values():
                if arrival.trajectory.trajectory_id == trajectory_id:
                    return arrival.trajectory
        return None
