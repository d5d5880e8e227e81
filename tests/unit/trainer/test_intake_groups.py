"""Groups as they fill up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import IntakeError
from practicum.trajectory import Trajectory
from services.trainer.intake.groups import Admission, Arrival, GroupAssembler
from tests.fixtures.trainer import failed, trajectory


def arrival(member: Trajectory, entry_id: str = "", *, usable: bool = True) -> Arrival:
    return Arrival(trajectory=member, entry_ids=(entry_id or member.trajectory_id,), usable=usable)


def test_take_when_groups_complete_out_of_order_follows_completion() -> None:
    assembler = GroupAssembler(2)
    for group, episode in [(0, 0), (1, 0), (1, 1), (0, 1)]:
        assembler.add(arrival(trajectory(group=group, episode=episode)))
    assert assembler.take(3) == ()
    assert [group.group_index for group in assembler.take(2)] == [1, 0]
    assert (assembler.num_complete, assembler.num_partial) == (0, 0)


def test_group_when_the_platform_failed_an_episode_closes_without_it() -> None:
    assembler = GroupAssembler(2)
    assembler.add(arrival(trajectory(episode=0)))
    assembler.add(arrival(failed(episode=1), usable=False))
    (group,) = assembler.take(1)
    assert [member.episode_id for member in group.usable] == ["ep_run_1_0_0"]
    assert len(group.entry_ids) == 2


def test_add_when_the_same_attempt_comes_again_releases_only_the_other_entry() -> None:
    assembler = GroupAssembler(2)
    assembler.add(arrival(trajectory(), "1"))
    again = assembler.add(arrival(trajectory(), "1"))
    other = assembler.add(arrival(trajectory(), "2"))
    assert (again.admission, again.released_entry_ids) == (Admission.DUPLICATE, ())
    assert (other.admission, other.released_entry_ids) == (Admission.DUPLICATE, ("2",))


def test_add_when_a_newer_attempt_comes_replaces_and_releases_the_older() -> None:
    assembler = GroupAssembler(2)
    assembler.add(arrival(trajectory(attempt=1, reward=1.0), "1"))
    newer = assembler.add(arrival(trajectory(attempt=2, reward=0.0), "2"))
    older = assembler.add(arrival(trajectory(attempt=1, reward=1.0), "3"))
    assert (newer.admission, newer.released_entry_ids) == (Admission.ACCEPTED, ("1",))
    assert (older.admission, older.released_entry_ids) == (Admission.SUPERSEDED, ("3",))
    assembler.add(arrival(trajectory(episode=1), "4"))
    (group,) = assembler.take(1)
    assert [member.reward for member in group.usable] == [0.0, 1.0]
    assert set(group.entry_ids) == {"2", "4"}


def test_add_when_a_step_took_the_episode_never_holds_it_again() -> None:
    consumed = {"ep_run_1_0_0": 2, "ep_run_1_0_1": 1}
    assembler = GroupAssembler(2, consumed_attempts=consumed, consumed_groups={"group_run_1_0"})
    same = assembler.add(arrival(trajectory(attempt=2), "1"))
    late = assembler.add(arrival(trajectory(attempt=1), "2"))
    stray = assembler.add(arrival(trajectory(episode=7), "3"))
    assert [verdict.admission for verdict in (same, late, stray)] == [
        Admission.CONSUMED,
        Admission.SUPERSEDED,
        Admission.SUPERSEDED,
    ]
    assert [verdict.released_entry_ids for verdict in (same, late, stray)] == [("1",), ("2",), ("3",)]
    assert assembler.num_partial == 0


def test_add_when_the_group_is_full_of_others_refuses() -> None:
    assembler = GroupAssembler(2)
    for episode in range(2):
        assembler.add(arrival(trajectory(episode=episode)))
    with pytest.raises(IntakeError) as refused:
        assembler.add(arrival(trajectory(episode=2)))
    assert refused.value.reason == "group_overflow"


def test_add_when_an_episode_is_part_of_another_group_refuses() -> None:
    assembler = GroupAssembler(2)
    assembler.add(arrival(trajectory(group=0)))
    with pytest.raises(IntakeError) as refused:
        assembler.add(arrival(replace(trajectory(group=1), episode_id="ep_run_1_0_0")))
    assert refused.value.reason == "group_mismatch"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=40))
def test_every_entry_comes_back_exactly_once_and_every_group_is_whole(
    deliveries: list[tuple[int, int, int]],
) -> None:
    assembler = GroupAssembler(3)
    returned: list[str] = []
    taken: list[str] = []
    for number, (group, episode, attempt) in enumerate(deliveries):
        member = trajectory(group=group, episode=episode, attempt=attempt, group_size=3)
        returned += assembler.add(arrival(member, str(number))).released_entry_ids
        for complete in assembler.take(1):
            assert len({a.trajectory.episode_id for a in complete.arrivals}) == 3
            taken.append(complete.group_id)
            returned += complete.entry_ids
    for complete_id in range(3):  # close what is open, so that nothing stays held
        for episode in range(3):
            member = trajectory(group=complete_id, episode=episode, attempt=9, group_size=3)
            returned += assembler.add(arrival(member, f"last-{complete_id}-{episode}")).released_entry_ids
    for complete in assembler.take(assembler.num_complete) if assembler.num_complete else ():
        taken.append(complete.group_id)
        returned += complete.entry_ids
    sent = [str(number) for number in range(len(deliveries))]
    sent += [f"last-{group}-{episode}" for group in range(3) for episode in range(3)]
    assert sorted(returned) == sorted(sent)
    assert len(taken) == len(set(taken)) == 3
