"""Places for episodes, and crews whose work ends with them."""

import asyncio

import pytest

from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.crew import Crew
from services.rollout.wilson import wilson_interval


async def test_capacity_when_full_refuses_groups_and_says_when_it_is_freed() -> None:
    capacity = Capacity(10)
    assert capacity.try_take(8)
    assert not capacity.try_take(8)
    assert not capacity.freed.is_set()
    capacity.give_back(8)
    assert capacity.freed.is_set()
    assert capacity.try_take(8)


async def test_capacity_when_a_group_is_larger_than_the_house_takes_it_alone() -> None:
    capacity = Capacity(4)
    assert capacity.try_take(8)
    assert not capacity.try_take(1)
    capacity.give_back(8)
    assert capacity.num_taken == 0


async def test_capacity_when_one_waits_is_not_passed_and_survives_cancelled_waiters() -> None:
    capacity = Capacity(1)
    order: list[str] = []

    async def stay(name: str) -> None:
        number = await capacity.take_some(1)
        order.append(name)
        await asyncio.sleep(0)
        capacity.give_back(number)

    assert capacity.try_take(1)
    waiting = [asyncio.ensure_future(stay(name)) for name in ("a", "b", "c")]
    await asyncio.sleep(0)
    waiting[1].cancel()
    capacity.give_back(1)
    assert not capacity.try_take(1), "the waiter comes first"
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["a", "c"]
    assert capacity.num_taken == 0


async def test_capacity_when_a_waiter_is_cancelled_after_its_turn_gives_the_place_back() -> None:
    capacity = Capacity(1)
    assert capacity.try_take(1)

    async def stay() -> None:
        await capacity.take_some(1)
        await asyncio.sleep(10)

    waiting = asyncio.ensure_future(stay())
    await asyncio.sleep(0)
    capacity.give_back(1)  # hands the place to the waiter
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert capacity.num_taken == 0


async def test_capacity_when_some_places_are_free_gives_what_there_is_up_to_what_was_asked() -> None:
    capacity = Capacity(5)
    assert await capacity.take_some(3) == 3
    assert await capacity.take_some(3) == 2
    capacity.give_back(5)
    assert capacity.num_taken == 0


async def test_crew_when_left_ends_all_its_tasks() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    async with Crew() as crew:
        crew.start(work())
        crew.start(work())
        await asyncio.sleep(0)
        assert len(crew) == 2
    assert ended == ["work", "work"]
    assert len(crew) == 0


@pytest.mark.parametrize(
    ("passed", "graded", "low", "high"),
    [(0, 10, 0.0, 0.2775), (50, 100, 0.4038, 0.5962), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_when_computed_agrees_with_published_values(
    passed: int, graded: int, low: float, high: float
) -> None:
    assert wilson_interval(passed, graded) == pytest.approx((low, high), abs=1e-4)


def test_wilson_when_nothing_is_graded_has_no_interval() -> None:
    with pytest.raises(ValueError, match="graded"):
        wilson_interval(0, 0)
