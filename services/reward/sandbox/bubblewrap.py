"""The bubblewrap backend: one warm fork server in a bubblewrap sandbox, one forked child per session.

The fork server shares nothing with the host but a read-only system; each child has namespaces of its own on
top. A fork server that died is replaced at the next `open`; its sessions are lost, which their callers see
as `SandboxError`.
"""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import asdict

from practicum.errors import SandboxError
from practicum.telemetry.logs import get_logger
from services.reward.sandbox.base import Session
from services.reward.sandbox.bwrap_command import find_bwrap
from services.reward.sandbox.channel import SessionChannel, open_channel
from services.reward.sandbox.fork_server import ForkServer, start_fork_server
from services.reward.sandbox.limits import SandboxLimits

_log = get_logger(__name__)


class BubblewrapSandbox:
    """See `base.Sandbox`."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        """The backend's word."""
        return "bubblewrap"

    async def start(self) -> None:
        """Starts the fork server."""
        await self._running()

    async def open(
        self, session_id: str, limits: SandboxLimits, *, link: socket.socket | None = None
    ) -> Session:
        """See `base.Sandbox`."""
        server = await self._running()
        ours, theirs = socket.socketpair()
        spec = {"limits": asdict(limits), "disk_bytes": limits.disk_bytes}
        fds = [theirs.fileno()] if link is None else [theirs.fileno(), link.fileno()]
        try:
            with theirs:
                pid = await server.open(spec, fds)
        except BaseException:
            ours.close()
            raise
        channel: SessionChannel = await open_channel(session_id, ours, lambda: server.end(pid))
        try:
            await channel.ready()
        except BaseException:
            await channel.close()
            raise
        return channel

    def capabilities(self) -> Mapping[str, str]:
        """See `base.Sandbox`."""
        return {
            "backend": self.name,
            "binary": find_bwrap(),
            "network": "none: a network namespace per session, without any interface but loopback",
            "system": "read-only: /usr, the interpreter and pytest; no file of the host besides",
            "processes": "a PID namespace per session; RLIMIT_NPROC counted in its user namespace",
            "memory": "RLIMIT_AS a process; the sum over processes and files is watched every 50 ms",
            "cpu": "RLIMIT_CPU a process, wall time a call",
            "files": "private tmpfs for /work and /tmp, RLIMIT_FSIZE a file",
            "privileges": "no capability, no_new_privs, no further user namespace",
        }

    def root_pid(self) -> int:
        """The process below which every sandbox runs, for measuring. Raises `SandboxError`."""
        if self._server is None:
            raise SandboxError("the sandbox backend has not started")
        return self._server.pid

    async def close(self) -> None:
        """See `base.Sandbox`."""
        self._closed = True
        async with self._starting:
            if self._server is not None:
                await self._server.close()
                self._server = None

    async def _running(self) -> ForkServer:
        async with self._starting:
            if self._closed:
                raise SandboxError("the sandbox backend is closed")
            if self._server is not None and not self._server.alive:
                _log.error("fork_server.ended", last_words=self._server.last_words())
                await self._server.close()
                self._server = None
            if self._server is None:
                self._server = await start_fork_server()
            return self._server
