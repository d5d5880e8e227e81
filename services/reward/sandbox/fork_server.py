"""The service's end of the fork server: starts it, asks it for sessions, learns when they have ended.

One process at a time. When it dies, every session it made is gone; the owner starts a new one.
"""

import asyncio
import json
import os
import socket
from asyncio.subprocess import PIPE, Process
from typing import Any

from practicum.errors import SandboxError
from services.reward.sandbox.bwrap_command import find_bwrap, fork_server_command, namespace_advice

START_S = 30.0
OPEN_S = 10.0
END_S = 5.0
MAX_MESSAGE_BYTES = 16 * 1024


class ForkServer:
    """A running fork server. Made by `start_fork_server`; `close` ends it with all its sessions."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._number = 0
        self._started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._opening: dict[int, asyncio.Future[int]] = {}
        self._ending: dict[int, asyncio.Event] = {}
        self._last_words = bytearray()
        self._listening = asyncio.create_task(self._listen())
        self.alive = True
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._on_message)

    @property
    def pid(self) -> int:
        """The process of bubblewrap itself."""
        return self._process.pid

    async def started(self) -> None:
        """Waits until pytest is warm. Raises `SandboxError` with the child's last words."""
        try:
            async with asyncio.timeout(START_S):
                await self._started
        except TimeoutError:
            raise SandboxError(f"the sandbox's fork server was not ready in {START_S:.0f} s") from None

    async def open(self, spec: dict[str, Any], fds: list[int]) -> int:
        """A new session on the first descriptor (the second, if any, is its link); returns its pid."""
        if not self.alive:
            raise SandboxError("the sandbox's fork server has ended")
        self._number += 1
        number = self._number
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._opening[number] = future
        message = json.dumps({"op": "open", "number": number, "spec": spec}).encode()
        try:
            async with asyncio.timeout(OPEN_S):
                await self._send(message, fds)
                return await future
        except TimeoutError:
            raise SandboxError(f"the fork server made no session in {OPEN_S:.0f} s") from None
        except OSError as error:
            raise SandboxError(f"the fork server took no request: {error}") from error
        finally:
            self._opening.pop(number, None)

    async def end(self, pid: int) -> None:
        """Kills a session's first process, and with it all others; returns when they are gone."""
        ended = self._ending.get(pid)
        if ended is None or not self.alive:
            return
        try:
            async with asyncio.timeout(END_S):
                await self._send(json.dumps({"op": "kill", "pid": pid}).encode(), [])
                await ended.wait()
        except (TimeoutError, OSError) as error:
            raise SandboxError(f"session process {pid} did not end") from error

    async def close(self) -> None:
        """Ends the fork server and everything below it."""
        self._lost()
        self._control.close()  # it exits when the other end hangs up
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listening

    def last_words(self) -> str:
        """The end of what the fork server wrote to stderr; only trusted code writes there."""
        return self._last_words.decode("utf-8", "replace").strip()

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._last_words += data
            del self._last_words[:-4096]

    async def _send(self, message: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._control, [message], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.005)

    def _on_message(self) -> None:
        while True:
            try:
                data = self._control.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            self._take(json.loads(data))

    def _take(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self._started.set_result(message["started"])
        elif "opened" in message:
            self._ending[message["pid"]] = asyncio.Event()
            future = self._opening.get(message["opened"])
            if future is not None and not future.done():
                future.set_result(message["pid"])
        elif "failed" in message:
            future = self._opening.get(message["failed"])
            if future is not None and not future.done():
                future.set_exception(SandboxError(f"no sandbox could be made: {message['error']}"))
        elif "ended" in message:
            ended = self._ending.pop(message["ended"], None)
            if ended is not None:
                ended.set()

    def _lost(self) -> None:
        if not self.alive:
            return
        self.alive = False
        asyncio.get_running_loop().remove_reader(self._control)
        waiting: list[asyncio.Future[Any]] = [self._started, *self._opening.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxError("the sandbox's fork server ended"))
                future.exception()  # nobody may be waiting
        for ended in self._ending.values():
            ended.set()
        self._ending.clear()


async def start_fork_server() -> ForkServer:
    """Starts a fork server. Raises `SandboxError` that says what this machine lacks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = fork_server_command(find_bwrap(), theirs.fileno())
        process = await asyncio.create_subprocess_exec(
            *command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stderr=PIPE, env={}
        )
    server = ForkServer(process, ours)
    try:
        await server.started()
    except SandboxError as error:
        await server.close()
        raise SandboxError(_explanation(str(error), server.last_words())) from None
    return server


def _explanation(error: str, said: str) -> str:
    advice = namespace_advice()
    parts = [error, said]
    if advice:
        parts.append(f"this kernel forbids unprivileged user namespaces; allow them with: {advice}")
    elif "mount proc" in said:
        parts.append(
            "the container's own /proc is covered, beside which the kernel allows no other: start the "
            "container as docker-compose.yml does, or with --security-opt systempaths=unconfined"
        )
    elif "namespace" in said or "ermission denied" in said or "not permitted" in said:
        parts.append(
            "the sandbox needs to make namespaces: start the container as docker-compose.yml does, with "
            "--security-opt seccomp=infra/reward/seccomp.json and an AppArmor profile that allows them; "
            f"this process has uid {os.getuid()}"
        )
    return "; ".join(part for part in parts if part)
