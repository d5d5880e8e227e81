"""The life of a service process: start, serve, drain, stop.

SIGTERM or SIGINT sets the stop event; workers finish what they hold and return, REST and gRPC take
no more calls, then everything is closed. A worker that dies takes the service down with its error,
so that a supervisor sees it; a half-dead service would look alive.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence

import uvicorn
from fastapi import FastAPI

from practicum.rpc.server import RpcServer
from practicum.telemetry.logs import get_logger

log = get_logger("practicum.service")

DRAIN_TIMEOUT_S = 20.0
RPC_GRACE_S = 5.0

Worker = Callable[[asyncio.Event], Awaitable[None]]
Close = Callable[[], Awaitable[None]]


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the service decides when to stop."""

    def capture_signals(self) -> "_NoSignals":  # type: ignore[override]
        return _NoSignals()


class _NoSignals:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


async def run_service(
    *,
    name: str,
    app: FastAPI,
    host: str,
    port: int,
    rpc: RpcServer | None,
    workers: Mapping[str, Worker],
    close: Sequence[Close],
) -> None:
    """Serve until a signal comes or a worker dies (its error is raised); everything is closed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = _Server(
        uvicorn.Config(
            app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=5
        )
    )
    log.info("service.starting", name=name, rest=f"{host}:{port}", rpc_port=rpc.port if rpc else None)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(_serve(server), name="rest")
            running = [
                group.create_task(_work(worker_name, worker, stop), name=worker_name)
                for worker_name, worker in workers.items()
            ]
            await _until_stopped(stop, serving, running)
            stop.set()
            await _drain(running)
            server.should_exit = True
    finally:
        if rpc is not None:
            await rpc.stop(RPC_GRACE_S)
        for step in close:
            try:
                await step()
            except Exception as error:
                log.warning("service.close_failed", name=name, exc_info=error)
        log.info("service.stopped", name=name)


async def _until_stopped(
    stop: asyncio.Event, serving: asyncio.Task[None], running: Sequence[asyncio.Task[None]]
) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopping, serving, *running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()


async def _work(name: str, worker: Worker, stop: asyncio.Event) -> None:
    await worker(stop)
    if not stop.is_set():
        raise RuntimeError(f"worker {name} ended although the service did not stop")


async def _drain(running: Sequence[asyncio.Task[None]]) -> None:
    if not running:
        return
    _, late = await asyncio.wait(running, timeout=DRAIN_TIMEOUT_S)
    for task in late:
        log.warning("service.drain_timeout", worker=task.get_name())
        task.cancel()


async def _serve(server: uvicorn.Server) -> None:
    await server.serve()
    if not server.started:
        raise RuntimeError("REST did not start; is the port taken?")
