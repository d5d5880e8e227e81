"""The tasks of one worker: none outlives it."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class Crew:
    """A task group whose tasks are cancelled when its owner leaves it; an error in one still ends all."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work beside the owner."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait until every task has ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self._group.__aexit__(kind, error, traceback)
