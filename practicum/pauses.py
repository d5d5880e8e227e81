"""How a worker waits between rounds without holding up a stop."""

import asyncio


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or less where the service stops meanwhile."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
