"""The staleness rule, and the order of tasks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.scheduler.runs import group_limit
from services.rollout.scheduler.selection import draw, task_of_group
from tests.fixtures.rollout import make_run


@pytest.mark.parametrize(
    ("served", "version", "consumed", "limit"),
    [
        (0, 0, 0, 6),  # bound 2 of 2 groups a step: steps 1 to 3 may begin
        (1, 1, 2, 8),
        (0, 1, 2, 6),  # the trainer went on, the engines did not: tokens would be too old
        (3, 1, 2, 8),  # published ahead of what was seen consumed
        (1, 1, 3, 8),  # half a step consumed is no step
        (0, 0, 6, 12),  # three batches discarded: the first step is still to come
        (1, 2, 8, 12),  # two of four discarded, and the engines a version behind
        (40, 40, 80, 20),  # never past the run's end
    ],
)
def test_limit_when_bound_is_two_follows_whichever_is_behind(
    served: int, version: int, consumed: int, limit: int
) -> None:
    run = make_run(
        groups_per_step=2,
        max_staleness=2,
        num_steps=10,
        groups_consumed=consumed,
        weight_version=version,
    )
    assert group_limit(run, served_version=served) == limit


def test_limit_when_the_bound_is_zero_is_one_step_ahead() -> None:
    run = make_run(groups_per_step=4, max_staleness=0, groups_consumed=8, weight_version=2)
    assert group_limit(run, served_version=2) == 12


@given(
    groups_per_step=st.integers(1, 9),
    max_staleness=st.integers(0, 5),
    served=st.integers(0, 50),
    steps_done=st.integers(0, 50),
    num_discarded=st.integers(0, 20),
)
def test_limit_when_groups_are_consumed_in_order_keeps_every_token_within_the_bound(
    groups_per_step: int, max_staleness: int, served: int, steps_done: int, num_discarded: int
) -> None:
    run = make_run(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        groups_consumed=(steps_done + num_discarded) * groups_per_step,
        weight_version=steps_done,
    )
    limit = group_limit(run, served_version=served)
    # What the trainer holds when it takes the last group, where no further batch is discarded.
    last_version = (limit - 1) // groups_per_step - num_discarded
    assert last_version - min(served, steps_done) <= max_staleness
    if served >= steps_done:
        assert limit >= run.groups_consumed + groups_per_step, "the next step's groups may always begin"


def test_order_when_epochs_pass_takes_every_task_once_an_epoch() -> None:
    tasks = [f"t{i}" for i in range(7)]
    first = [task_of_group(tasks, index, seed=3) for index in range(7)]
    second = [task_of_group(tasks, index, seed=3) for index in range(7, 14)]
    assert Counter(first) == Counter(second) == Counter(tasks)
    assert first != second
    assert first != [task_of_group(tasks, index, seed=4) for index in range(7)]
    assert first == [task_of_group(tasks, index, seed=3) for index in range(7)]


def test_draw_when_larger_begins_with_the_smaller() -> None:
    tasks = [f"t{i}" for i in range(50)]
    assert draw(tasks, 20, seed=1)[:10] == draw(tasks, 10, seed=1)
    assert len(set(draw(tasks, 50, seed=1))) == 50
    assert draw(tasks, 10, seed=1) != draw(tasks, 10, seed=2)
