"""Runs untrusted work in a child process of the session, under limits, and leaves nothing running.

The caller is process 1 of the session's PID namespace, so `kill(-1)` reaches everything the work started,
and orphans come back here to be reaped. Output is drained as it comes and only its head and tail are kept.
"""

import codecs
import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from . import kernel

POLL_S = 0.05
_PIPE_BYTES = 1 << 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one piece of work may use."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    num_processes: int
    file_size_bytes: int
    output_bytes: int


class HeadAndTail:
    """Keeps the first and the last half of a stream under a bound of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def add(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self.total_bytes += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._half:
                del self._tail[: -self._half]

    def text(self) -> str:
        """The kept bytes as text: invalid UTF-8 is escaped, a cut is marked and never splits a character."""
        tail = bytes(self._tail[-self._half :])
        if len(self._head) + len(tail) == self.total_bytes:
            return (bytes(self._head) + tail).decode("utf-8", "backslashreplace")
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        head = decoder.decode(bytes(self._head))
        half_a_character = decoder.getstate()[0]
        tail = tail.lstrip(bytes(range(0x80, 0xC0)))  # the rest of the character before
        cut_bytes = self.total_bytes - len(self._head) + len(half_a_character) - len(tail)
        return f"{head}\n[{cut_bytes} bytes cut]\n{tail.decode('utf-8', 'backslashreplace')}"


@dataclass(slots=True, kw_only=True)
class Finished:
    """How a piece of work ended."""

    exit_status: int | None = None  # None = ended by a signal
    signal: int = 0
    limit_hit: str = ""
    seconds: float = 0.0
    output: HeadAndTail
    results: bytearray = field(default_factory=bytearray)


def run(
    work: Callable[[int], int], limits: Limits, *, max_result_bytes: int = 0, keep_fd: int = -1
) -> Finished:
    """Runs `work(result_fd)` in a fork and returns when it has ended; its return is the exit status.

    The fork has the limits, stdin from /dev/null, stdout and stderr captured, and no other descriptor than
    `result_fd` (what is written there comes back in `results`) and `keep_fd`, which this process closes.
    """
    output_read, output_write = os.pipe()
    result_read, result_write = os.pipe()
    started_s = time.monotonic()
    try:
        pid = os.fork()
    except OSError:
        for fd in (output_read, output_write, result_read, result_write):
            os.close(fd)
        return Finished(limit_hit="processes", output=HeadAndTail(1))
    if pid == 0:
        _become_work(work, limits, output_write, result_write, keep_fd)
    os.close(output_write)
    os.close(result_write)
    if keep_fd >= 0:
        os.close(keep_fd)
    finished = Finished(output=HeadAndTail(limits.output_bytes))
    try:
        _watch(pid, output_read, result_read, max_result_bytes, limits, started_s, finished)
    finally:
        end_everything()
        os.close(output_read)
        os.close(result_read)
    finished.seconds = time.monotonic() - started_s
    return finished


def end_everything() -> None:
    """Kills and reaps every other process of the session."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _become_work(
    work: Callable[[int], int], limits: Limits, output_write: int, result_write: int, keep_fd: int
) -> None:
    status = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output_write, 1)
        os.dup2(output_write, 2)
        kept = sorted({result_write, keep_fd} - {-1})
        low = 3
        for fd in kept:
            os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, 4096)
        _set_limits(limits)
        kernel.set_dumpable(True)  # else the supervisor cannot read its exact memory
        status = work(result_write)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 — the policy's code may raise anything
        status = 1
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _set_limits(limits: Limits) -> None:
    cpu_s = max(1, round(limits.cpu_s))
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_size_bytes, limits.file_size_bytes),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, limits.num_processes + 1, limits.num_processes + 1),  # + the supervisor
    ):
        resource.setrlimit(kind, (soft, hard))


def _watch(
    pid: int,
    output_read: int,
    result_read: int,
    max_result_bytes: int,
    limits: Limits,
    started_s: float,
    finished: Finished,
) -> None:
    pid_fd = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (output_read, result_read):
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    poll.register(pid_fd, select.POLLIN)
    deadline_s = started_s + limits.wall_s
    next_memory_check_s = started_s + POLL_S
    ended = False
    try:
        while not ended:
            for fd, events in poll.poll(POLL_S * 1000):
                if fd == pid_fd:
                    ended = True
                elif not events & select.POLLIN:
                    poll.unregister(fd)
                elif fd == output_read:
                    finished.output.add(os.read(fd, _PIPE_BYTES))
                else:
                    _take_results(fd, finished, max_result_bytes)
            now_s = time.monotonic()
            if not ended and now_s >= deadline_s:
                finished.limit_hit = "wall"
            elif not ended and now_s >= next_memory_check_s:
                next_memory_check_s = now_s + POLL_S
                if memory_bytes(limits.memory_bytes) > limits.memory_bytes:
                    finished.limit_hit = "memory"
            if finished.limit_hit:
                os.kill(pid, signal.SIGKILL)
                break
        _, status = os.waitpid(pid, 0)
        _explain(status, finished)
        # a grandchild may hold the pipe open: take what is there, never wait for its end
        for _ in range(64):
            data = _read_now(output_read)
            if not data:
                break
            finished.output.add(data)
        while _take_results(result_read, finished, max_result_bytes):
            pass
    finally:
        os.close(pid_fd)


def _explain(status: int, finished: Finished) -> None:
    if os.WIFEXITED(status):
        finished.exit_status = os.WEXITSTATUS(status)
        return
    finished.signal = os.WTERMSIG(status)
    if not finished.limit_hit:
        by_signal = {signal.SIGXCPU: "cpu", signal.SIGKILL: "cpu", signal.SIGXFSZ: "file_size"}
        finished.limit_hit = by_signal.get(signal.Signals(finished.signal), "")


def _take_results(fd: int, finished: Finished, max_bytes: int) -> int:
    data = _read_now(fd)
    finished.results += data[: max(0, max_bytes - len(finished.results))]
    return len(data)


def _read_now(fd: int) -> bytes:
    try:
        return os.read(fd, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def memory_bytes(enough: int) -> int:
    """Memory of every other process and of the private file systems, in bytes.

    Resident pages shared with the fork server count once per process in the cheap figure, so it is only
    made exact (proportional) where it reaches `enough`.
    """
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    files = sum(_file_system_bytes(path) for path in ("/work", "/tmp"))
    cheap = sum(_resident_bytes(pid) for pid in pids)
    if files + cheap <= enough:
        return files + cheap
    return files + sum(_proportional_bytes(pid) for pid in pids)


def _file_system_bytes(path: str) -> int:
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _resident_bytes(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def _proportional_bytes(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _resident_bytes(pid)
