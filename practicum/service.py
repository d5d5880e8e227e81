"""The life of a service process: start, serve, drain, stop.

SIGTERM or SIGINT sets the stop event. From then on REST answers 503 and gRPC's health NOT_SERVING,
while calls still come through: what others have open here goes on. Workers begin nothing more, finish
what they hold and return; at the limit they are cancelled, and what they held is given back. Then
REST and gRPC end and everything is closed. Whatever hangs after that cannot keep the process: it ends
with the same status, since what it held is in SQL and in the streams and a crash loses none of it.

A worker that dies takes the service down with its error, so that a supervisor sees it; a half-dead
service would look alive.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import uvicorn
from fastapi import FastAPI

from practicum.rest.drain import Draining
from practicum.rpc.server import RpcServer
from practicum.telemetry.logs import get_logger

log = get_logger("practicum.service")

DRAIN_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 15.0  # to give back what is left, and to close
REST_GRACE_S = 2
RPC_GRACE_S = 2.0

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
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> None:
    """Serve until a signal comes or a worker dies (its error is raised); everything is closed.

    Returns within `drain_timeout_s` and `CLOSE_TIMEOUT_S` of a signal, or ends the process with status 0.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    edge = Draining(app)
    server = _Server(
        uvicorn.Config(
            edge,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=REST_GRACE_S,
        )
    )
    log.info("service.starting", name=name, rest=f"{host}:{port}", rpc_port=rpc.port if rpc else None)
    drained_at_s = loop.time()
    with ExitStack() as guarding:
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(_serve(server), name="rest")
                running = [
                    group.create_task(_work(worker_name, worker, stop), name=worker_name)
                    for worker_name, worker in workers.items()
                ]
                await _until_stopped(stop, serving, running)
                if stop.is_set():
                    log.info("service.draining", name=name, limit_s=drain_timeout_s)
                    drained_at_s = loop.time() + drain_timeout_s
                    guarding.enter_context(_ended_at_the_latest(drain_timeout_s + CLOSE_TIMEOUT_S))
                stop.set()
                edge.begin()
                if rpc is not None:
                    await rpc.drain()
                await _drain(running, drain_timeout_s)
                server.should_exit = True
        finally:
            if rpc is not None:
                await rpc.stop(max(RPC_GRACE_S, drained_at_s - loop.time()))
            for step in close:
                try:
                    await step()
                except Exception as error:
                    log.warning("service.close_failed", name=name, exc_info=error)
            log.info("service.stopped", name=name)


@contextmanager
def _ended_at_the_latest(limit_s: float) -> Iterator[None]:
    """End the process where the body takes longer: not even a thread that computes on can keep it."""

    def end() -> None:
        log.warning("service.ended_at_the_limit", limit_s=limit_s)
        os._exit(0)

    watch = threading.Timer(limit_s, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


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


async def _drain(running: Sequence[asyncio.Task[None]], timeout_s: float) -> None:
    if not running:
        return
    _, late = await asyncio.wait(running, timeout=timeout_s)
    for task in late:
        log.warning("service.drain_timeout", worker=task.get_name())
        task.cancel()


async def _serve(server: uvicorn.Server) -> None:
    await server.serve()
    if not server.started:
        raise RuntimeError("REST did not start; is the port taken?")
