"""The bound on episodes in flight, shared by runs, evaluations and demonstrations."""

import asyncio
from collections import deque


class Capacity:
    """Places for episodes. A waiter for many places is not passed by later waiters for few."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self.freed = asyncio.Event()  # set when places became free; whoever polls clears it
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, number: int) -> bool:
        """Take places now, or none; a set larger than the whole takes all of an idle house."""
        if self._waiting or not self._fits(number):
            return False
        self.num_taken += number
        return True

    def give_back(self, number: int) -> None:
        """Free places and let the longest waiting in."""
        if number == 0:
            return  # nobody is to look again for nothing
        self.num_taken -= number
        while self._waiting and self._fits(self._waiting[0][0]):
            wanted, future = self._waiting.popleft()
            if future.cancelled():
                continue
            self.num_taken += wanted
            future.set_result(None)
        self.freed.set()

    async def take_some(self, most: int) -> int:
        """Wait for one place, and take as many as are free, up to `most`; their number."""
        await self._wait_for(1)
        return 1 + self.try_take_some(most - 1)

    def try_take_some(self, most: int) -> int:
        """Take as many places as are free now, up to `most`; their number."""
        number = 0
        while number < most and self.try_take(1):
            number += 1
        return number

    async def _wait_for(self, number: int) -> None:
        if self.try_take(number):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(number)
            raise

    def _fits(self, number: int) -> bool:
        return self.num_taken + number <= self.num_places or self.num_taken == 0
