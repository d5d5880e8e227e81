"""The warm fork server: a trusted process with pytest started, that makes one child per session.

It never sees a workspace, runs no code of a policy and holds no secret. Each child is born in namespaces of
its own (users, processes, mounts, network, IPC, host name), which is the isolation a fresh bubblewrap gives,
without starting an interpreter. Talks to the service over a SOCK_SEQPACKET socket: `open` with the session's
channel attached, `kill` by pid; reports `opened`, `failed` and `ended`. When the service goes away, so does
this process, and with it every session.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from . import kernel, session
from .warm_pytest import WarmPytest, warm_up

MAX_MESSAGE_BYTES = 16 * 1024
_CHILD_OF_ROOT = 65534  # "nobody": as root the kernel enforces no bound on processes


def main(control_fd: int) -> None:
    """Serves until the service closes the control socket."""
    control = socket.socket(fileno=control_fd)
    control.setblocking(True)
    _give_up_root()
    warm_up()
    warm = session.WarmRunners(full=WarmPytest(), lean=WarmPytest(lean=True))
    os.chdir("/")
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of the shared heap
    _Server(control, warm).serve()


def _give_up_root() -> None:
    if os.getuid() == 0:
        if not os.path.exists("/proc/self"):
            # bubblewrap's own /proc has read-only covers as root, which forbid a fresh one in a child
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID_NODEV | kernel.MS_NOEXEC)
        os.setgroups([])
        os.setresgid(_CHILD_OF_ROOT, _CHILD_OF_ROOT, _CHILD_OF_ROOT)
        os.setresuid(_CHILD_OF_ROOT, _CHILD_OF_ROOT, _CHILD_OF_ROOT)
        kernel.set_dumpable(True)  # else /proc/self, and so the user map of a child, belongs to root


class _Server:
    def __init__(self, control: socket.socket, warm: session.WarmRunners) -> None:
        self._control = control
        self._warm = warm
        self._owner = (os.getuid(), os.getgid())
        self._children: set[int] = set()
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._wake_write = wake_write
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        self._say({"started": sys.version.split()[0]})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._wake_read in ready:
                self._reap()
            if self._control.fileno() in ready and not self._take():
                return

    def _take(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 2)
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "open":
            self._open(message, fds)
        elif message["op"] == "kill" and message["pid"] in self._children:
            os.kill(message["pid"], signal.SIGKILL)
        return True

    def _open(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            pid = kernel.fork_into_new_namespaces()
        except OSError as error:
            self._say({"failed": message["number"], "error": str(error)})
            pid = -1
        if pid == 0:
            self._become_session(message, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._children.add(pid)
            self._say({"opened": message["number"], "pid": pid})

    def _become_session(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (self._wake_read, self._wake_write):
                os.close(fd)
            self._control.close()
            channel = socket.socket(fileno=fds[0])
            channel.setblocking(True)
            link_fd = fds[1] if len(fds) > 1 else -1
            if link_fd >= 0:
                os.set_blocking(link_fd, True)
            session.main(channel, link_fd, message["spec"], self._warm, self._owner)
        except BaseException:  # noqa: BLE001 — a child must never run the server's own code
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)

    def _reap(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._children.discard(pid)
            self._say({"ended": pid, "status": status})

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())
