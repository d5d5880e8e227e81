"""What is known about the labels on tokens, whichever replica loaded the weights.

A label whose load is settled is remembered, so that a turn asks nothing of SQL; one that was never met is
looked up, and one whose load is still to be proven is waited for.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from practicum.clock import Clock
from services.rollout.engine.records import Load, LoadState

_MAX_SETTLED = 1024

Find = Callable[[str], Awaitable[Load | None]]


class LabelBook:
    """Verdicts by label."""

    def __init__(self, find: Find, *, clock: Clock, wait_s: float = 60.0, poll_s: float = 0.1) -> None:
        self._find = find
        self._clock = clock
        self._wait_s = wait_s
        self._poll_s = poll_s
        self._settled: OrderedDict[str, Load] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Load | None]] = {}

    def knows(self, label: str) -> bool:
        """Whether the label's load is settled, and known here to be."""
        return label in self._settled

    def settle(self, load: Load, state: LoadState) -> None:
        """Remember what became of a load."""
        self._settled[load.label] = replace(load, state=state)
        if len(self._settled) > _MAX_SETTLED:
            self._settled.popitem(last=False)

    async def now(self, label: str) -> Load | None:
        """The load behind a label as it stands; None = no replica gave that name."""
        load = self._settled.get(label)
        if load is None:
            load = await self._find(label)
            if load is not None and load.state is not LoadState.PENDING:
                self.settle(load, load.state)
        return load

    async def verdict(self, label: str) -> Load | None:
        """The load behind a label once it is settled, or as it stands after the longest wait."""
        if label in self._settled:
            return self._settled[label]
        asking = self._asking.get(label)
        if asking is None:
            # One for all who wait: a publication is met by every generation under way.
            asking = self._asking[label] = asyncio.create_task(self._ask(label))
            asking.add_done_callback(lambda _: self._asking.pop(label, None))
        return await asyncio.shield(asking)

    async def _ask(self, label: str) -> Load | None:
        give_up_at_s = self._clock.monotonic() + self._wait_s
        while True:
            load = await self.now(label)
            if load is None or load.state is not LoadState.PENDING:
                return load
            if self._clock.monotonic() >= give_up_at_s:
                return load
            await self._clock.sleep(self._poll_s)
