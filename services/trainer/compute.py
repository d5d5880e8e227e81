"""The one thread that computes: everything that blocks for long runs here, in order.

The event loop stays free to answer REST and gRPC while a step runs. One thread and no more: the
backend is not made for two, and what was asked for first is done first, even where its caller was
cancelled meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs blocking calls one after the other."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` is what torch may use inside one call."""
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="trainer-compute",
            initializer=partial(torch.set_num_threads, num_threads),
        )

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a blocking call."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(call, *args, **kwargs))

    async def close(self) -> None:
        """Wait for the call that runs, and end the thread."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, partial(self._executor.shutdown, wait=True, cancel_futures=True))
