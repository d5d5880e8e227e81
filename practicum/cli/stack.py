"""The local stack: redis-server, the CPU engine and the three services as processes of one machine.

Starts them in the order in which they need each other, restarts one that dies within a budget, and
ends all of them. The addresses and the token of a running stack lie in `{data_dir}/stack.json`, for
the other commands; the file is readable by its owner alone and removed at the end.
"""

import asyncio
import fcntl
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import redis.asyncio as redis
from redis.exceptions import RedisError

from practicum.cli.binaries import redis_server_path
from practicum.cli.ports import free_ports
from practicum.cli.process import ManagedProcess, ProcessFailed, ProcessSpec
from practicum.telemetry.logs import get_logger

log = get_logger("practicum.stack")

MAX_RESTARTS = 5  # within HEALTHY_AFTER_S of each other
HEALTHY_AFTER_S = 600.0
_SERVICES = ("rollout", "reward", "trainer")
_PORTS = ("redis", "engine", *(f"{name}_{kind}" for name in _SERVICES for kind in ("rest", "rpc")))
HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackAddresses:
    """How a client reaches a stack."""

    supervisor_pid: int
    model: str
    token: str
    rollout_url: str
    reward_url: str
    trainer_url: str
    engine_url: str
    pids: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What a local stack is made of."""

    data_dir: Path
    model: Path  # the Hugging Face folder that the engine serves first
    dtype: str = "float32"
    engine_threads: int = 1
    trainer_threads: int = 1
    max_running_requests: int = 64
    engine_timeout_s: float = 180.0
    drain_timeout_s: float = 5.0  # somebody waits at a terminal; what is cut is taken up at the next start
    engine_url: str | None = None  # an engine that runs already; None starts a CPU engine


def read_stack(data_dir: Path) -> StackAddresses | None:
    """The stack that runs on `data_dir`, or None."""
    path = data_dir / "stack.json"
    try:
        addresses = StackAddresses(**json.loads(path.read_text()))
        os.kill(addresses.supervisor_pid, 0)
    except PermissionError:
        pass  # it lives, as another user
    except (FileNotFoundError, ProcessLookupError, ValueError, TypeError):
        return None
    return addresses


class Stack:
    """The processes of one local stack, from start to stop."""

    def __init__(self, options: StackOptions, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._options = options
        self._on_progress = on_progress
        self._token = secrets.token_urlsafe(24)
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._waves: list[list[ManagedProcess]] = []  # in the order of their start
        self._lock: IO[str] | None = None  # None = not started

    @property
    def addresses(self) -> StackAddresses:
        """Where the stack is."""
        return StackAddresses(
            supervisor_pid=os.getpid(),
            model=str(self._options.model.resolve()),
            token=self._token,
            rollout_url=self._url("rollout_rest"),
            reward_url=self._url("reward_rest"),
            trainer_url=self._url("trainer_rest"),
            engine_url=self._url("engine"),
            pids={process.spec.name: process.pid for process in self._processes if process.pid},
        )

    async def start(self) -> None:
        """Start everything in order; on failure what was started is ended again."""
        self._options.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_folder(self._options.data_dir)
        try:
            for specs in self._plan():
                self._on_progress("starting " + ", ".join(spec.name for spec in specs))
                wave = [ManagedProcess(spec, self._log_path(spec.name)) for spec in specs]
                self._waves.append(wave)
                await _all_or_raise(process.start() for process in wave)
        except BaseException:
            await self.stop()
            raise
        self._write_addresses()

    async def watch(self) -> None:
        """Restart what dies, within a budget; `ProcessFailed` when the budget is spent."""
        await _all_or_raise(self._keep_alive(process) for process in self._processes)

    async def stop(self) -> None:
        """End every process, those last started first; stopping twice is no error."""
        if self._lock is None:
            return
        (self._options.data_dir / "stack.json").unlink(missing_ok=True)
        while self._waves:
            await asyncio.gather(*(process.stop() for process in self._waves.pop()))
        self._lock.close()
        self._lock = None

    async def _keep_alive(self, process: ManagedProcess) -> None:
        loop = asyncio.get_running_loop()
        ends_s: list[float] = []
        while len(ends_s) <= MAX_RESTARTS:
            status = await process.wait()
            ends_s = [end_s for end_s in ends_s if loop.time() - end_s < HEALTHY_AFTER_S] + [loop.time()]
            log.warning("stack.process_ended", process=process.spec.name, status=status, ends=len(ends_s))
            await process.stop()
            await process.start()
            self._write_addresses()
        raise ProcessFailed(f"{process.spec.name} ended {len(ends_s)} times; see {process.log_path}")

    @property
    def _processes(self) -> list[ManagedProcess]:
        return [process for wave in self._waves for process in wave]

    def _plan(self) -> list[list[ProcessSpec]]:
        own_engine = [] if self._options.engine_url else [self._engine()]
        return [[self._redis(), *own_engine, self._reward()], [self._rollout(), self._trainer()]]

    def _redis(self) -> ProcessSpec:
        folder = self._options.data_dir / "redis"
        folder.mkdir(parents=True, exist_ok=True)
        # In a file of our own, since a command line can be read by everyone on the machine.
        config = folder / "redis.conf"
        _write_private(
            config,
            f'port {self._ports["redis"]}\nbind 127.0.0.1\ndir "{folder.resolve()}"\n'
            f'appendonly yes\nsave ""\nrequirepass {self._token}\n',
        )
        command = [redis_server_path(), str(config)]
        return ProcessSpec(
            name="redis", command=command, environment=dict(os.environ), is_ready=self._redis_answers
        )

    def _engine(self) -> ProcessSpec:
        options = self._options
        command = [sys.executable, "-m", "engines.cpu.main", "--model", str(options.model)]
        command += ["--host", "127.0.0.1", "--port", str(self._ports["engine"]), "--dtype", options.dtype]
        command += ["--threads", str(options.engine_threads)]
        command += ["--max-running-requests", str(options.max_running_requests)]
        return ProcessSpec(
            name="engine",
            command=command,
            environment=self._environment(),
            is_ready=_http_ok(self._url("engine") + "/health"),
            start_timeout_s=options.engine_timeout_s,
        )

    def _reward(self) -> ProcessSpec:
        return self._service("reward", {})

    def _rollout(self) -> ProcessSpec:
        return self._service(
            "rollout",
            {
                "PRACTICUM_ENGINE_URLS": self._url("engine"),
                "PRACTICUM_ENGINE_SLOTS": str(self._options.max_running_requests),
                "PRACTICUM_MODEL_PATH": str(self._options.model),
            },
        )

    def _trainer(self) -> ProcessSpec:
        return self._service("trainer", {"PRACTICUM_TRAINER_THREADS": str(self._options.trainer_threads)})

    def _service(self, name: str, extra: dict[str, str]) -> ProcessSpec:
        environment = self._environment() | {
            "PRACTICUM_DATABASE_URL": f"sqlite:///{self._options.data_dir.resolve()}/{name}.sqlite",
            "PRACTICUM_REST_PORT": str(self._ports[f"{name}_rest"]),
            "PRACTICUM_RPC_PORT": str(self._ports[f"{name}_rpc"]),
            **extra,
        }
        return ProcessSpec(
            name=name,
            command=[sys.executable, "-m", f"services.{name}.main"],
            environment=environment,
            is_ready=_http_ok(self._url(f"{name}_rest") + "/healthz"),
        )

    def _environment(self) -> dict[str, str]:
        # One thread a process by default: two cores are shared by an engine, a trainer and sandboxes.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PRACTICUM_")}
        return kept | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PRACTICUM_TOKEN": self._token,
            "PRACTICUM_REDIS_URL": f"redis://:{self._token}@127.0.0.1:{self._ports['redis']}/0",
            "PRACTICUM_DRAIN_TIMEOUT_S": str(self._options.drain_timeout_s),
            "PRACTICUM_DATA_DIR": str(self._options.data_dir.resolve()),
            **{
                f"PRACTICUM_{name.upper()}_RPC": f"127.0.0.1:{self._ports[f'{name}_rpc']}"
                for name in _SERVICES
            },
        }

    async def _redis_answers(self) -> bool:
        client = redis.Redis(port=self._ports["redis"], password=self._token)
        try:
            return bool(await client.ping())
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()

    def _url(self, name: str) -> str:
        if name == "engine" and self._options.engine_url:
            return self._options.engine_url
        return f"http://127.0.0.1:{self._ports[name]}"

    def _log_path(self, name: str) -> Path:
        return self._options.data_dir / "logs" / f"{name}.log"

    def _write_addresses(self) -> None:
        _write_private(self._options.data_dir / "stack.json", json.dumps(asdict(self.addresses), indent=2))


@asynccontextmanager
async def running_stack(
    options: StackOptions, on_progress: Callable[[str], None] = lambda _: None
) -> AsyncIterator[StackAddresses]:
    """A stack for the length of a block; its processes are watched, and ended whatever happens."""
    stack = Stack(options, on_progress)
    await stack.start()
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(stack.watch())
            yield stack.addresses
            watching.cancel()
    finally:
        await stack.stop()


def _lock_folder(data_dir: Path) -> IO[str]:
    """The open lock file of a data folder; `ProcessFailed` where another stack holds it."""
    lock = (data_dir / "stack.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ProcessFailed(
            f"a stack already runs on {data_dir}; stop it or give another --data-dir"
        ) from error
    return lock


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whatever was there before."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)


def _http_ok(url: str) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        try:
            async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S) as client:
                return (await client.get(url)).status_code == 200
        except httpx.HTTPError:
            return False

    return ask


async def _all_or_raise(waits: Iterable[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for wait in waits:
                group.create_task(wait)
    except* ProcessFailed as failures:
        # One failure is what a person can act on; the others follow from it.
        raise failures.exceptions[0] from None
