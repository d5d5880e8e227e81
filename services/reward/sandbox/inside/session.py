"""Process 1 of a session: sets up its namespaces, then serves requests until the service hangs up.

Everything the policy causes runs in forks of this process, as the same unprivileged user, and is killed
before the answer is sent. This process cannot be traced or signalled by them. It holds no secret: at worst
a policy lies about its own workspace, which the clean room does not believe anyway.
"""

import json
import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import candidate, frames, kernel, processes, proxies
from .files import WORK, FileRefused, WorkFolder
from .warm_pytest import Record, WarmPytest

INSIDE_ID = 1000
MAX_LISTED = 1000
MAX_TEST_FILES = 200
MAX_RESULT_BYTES = 1024 * 1024
_PATH = "/usr/local/bin:/usr/bin:/bin"

Answer = tuple[frames.Header, Sequence[bytes]]


class TimeIsUp(KeyboardInterrupt):
    """The wall limit of tests that run in this process; pytest lets nothing else through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRunners:
    """pytest as the fork server started it: with all fixtures, and without."""

    full: WarmPytest
    lean: WarmPytest


def main(
    channel: socket.socket, link_fd: int, spec: dict[str, Any], warm: WarmRunners, owner: tuple[int, int]
) -> None:
    """The life of a session; returns when it is to end. `link_fd` is -1 where there is no link.

    `owner` is the fork server's user and group: unknown in the new namespace until they are mapped.
    """
    try:
        _set_up(spec, owner)
        server = _Server(channel, link_fd, spec, warm)
    except OSError as error:
        frames.send(channel, {"failed": f"the sandbox could not be set up: {error}"})
        return
    frames.send(channel, {"ready": True})
    server.serve()


def _set_up(spec: dict[str, Any], owner: tuple[int, int]) -> None:
    kernel.map_single_user(INSIDE_ID, *owner)
    kernel.set_host_name("sandbox")
    kernel.mount(None, "/", None, kernel.MS_PRIVATE_RECURSIVE)
    size = f"size={spec['disk_bytes']},nr_inodes=16384"
    kernel.mount("tmpfs", WORK, "tmpfs", kernel.MS_NOSUID_NODEV, f"{size},mode=0755")
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID_NODEV, f"{size},mode=1777")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID_NODEV | kernel.MS_NOEXEC)
    # no user namespace of its own: it would give the policy capabilities to attack the kernel with
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    # where the machine's memory is short, a session goes before the service does
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.chdir(WORK)  # the folder inherited from the fork server is another, shared one
    kernel.drop_capabilities()
    kernel.set_dumpable(False)


class _Server:
    def __init__(self, channel: socket.socket, link_fd: int, spec: dict[str, Any], warm: WarmRunners) -> None:
        self._channel = channel
        self._link_fd = link_fd
        self._warm = warm
        self._limits = spec["limits"]
        self._files = WorkFolder(self._limits["file_size_bytes"])
        self._operations: dict[str, Callable[[frames.Header, list[bytes]], Answer]] = {
            "lay_out": self._lay_out,
            "read": self._read,
            "write": self._write,
            "edit": self._edit,
            "list": self._list,
            "run": self._run,
            "python": self._python,
            "run_tests": self._run_tests,
            "judge": self._judge,
            "candidate": self._candidate,
            "snapshot": self._snapshot,
        }

    def serve(self) -> None:
        """Answers requests until the channel closes."""
        while True:
            frame = frames.receive(self._channel)
            if frame is None:
                return
            header, blobs = frame
            try:
                answer, parts = self._operations[header["op"]](header, blobs)
            except FileRefused as error:
                answer, parts = {"refused": str(error)}, ()
            except (OSError, ValueError, RecursionError, MemoryError) as error:
                # the policy can shape the workspace so that an operation fails; the session goes on
                answer, parts = {"refused": f"{type(error).__name__}: {error}"}, ()
            frames.send(self._channel, answer, parts)

    def _lay_out(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        for entry, content in zip(header["files"], blobs, strict=True):
            path, executable, pristine = entry
            self._files.lay_out(path, content, executable, pristine=pristine)
        return {}, ()

    def _read(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        kept = processes.HeadAndTail(self._limits["output_bytes"])
        kept.add(self._files.read(header["path"]))
        return {"output": kept.text()}, ()

    def _write(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        self._files.write(header["path"], blobs[0])
        return {}, ()

    def _edit(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        old, new = blobs
        self._files.edit(header["path"], old.decode(), new.decode())
        return {}, ()

    def _list(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        paths = self._files.paths()
        shown = [path.encode("utf-8", "backslashreplace").decode() for path in paths[:MAX_LISTED]]
        return {"paths": shown, "num_paths": len(paths)}, ()

    def _snapshot(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        found = self._files.snapshot()
        changed = found["changed"]
        named = [(path, executable) for path, _, executable in changed]
        answer = {"changed": named, "removed": found["removed"], "refused": found["refused"]}
        return answer, [content for _, content, _ in changed]

    def _run(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        argv = header["argv"]

        def work(result_fd: int) -> int:
            os.chdir(WORK)
            environment = {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
            os.execvpe(argv[0], argv, environment)

        return self._ran(processes.run(work, self._call_limits(header)))

    def _python(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        code = blobs[0]

        def work(result_fd: int) -> int:
            os.chdir(WORK)
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
            return 0

        return self._ran(processes.run(work, self._call_limits(header)))

    def _run_tests(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        paths = [path for path in self._files.paths() if _is_test_file(path)][:MAX_TEST_FILES]
        if not paths:
            return {"records": [], "files": 0}, ()
        answer, parts = self._tests(header, paths)
        return {**answer, "files": len(paths)}, parts

    def _judge(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        functions = header["functions"]
        if not functions:
            return self._tests(header, header["paths"], rewrite=False)
        return self._judge_apart(header)

    def _judge_apart(self, header: frames.Header) -> Answer:
        # No fork: this sandbox holds the task author's tests and no code of the policy.
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        memory_bytes = self._limits["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        link = proxies.install(self._link_fd, header["functions"])
        records: list[Record] = []
        started_s = time.monotonic()
        signal.signal(signal.SIGALRM, _raise_time_is_up)
        signal.setitimer(signal.ITIMER_REAL, header["wall_s"])
        limit_hit = ""
        try:
            passed = self._warm.lean.run(header["paths"], records.append, rewrite=False)
        except KeyboardInterrupt:
            passed, limit_hit = False, "wall"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            link.close()
        if link.unsupported:
            records.append({"unsupported": link.unsupported})
        seconds = time.monotonic() - started_s
        answer = {"exit_status": 0 if passed else 1, "limit_hit": limit_hit, "seconds": seconds}
        return {**answer, "records": records}, ()

    def _candidate(self, header: frames.Header, blobs: list[bytes]) -> Answer:
        link_fd = self._link_fd
        self._link_fd = -1  # `run` closes it here, so that the end of the fork ends the link
        limits = self._call_limits(header)
        return self._ran(processes.run(lambda _: candidate.serve(link_fd), limits, keep_fd=link_fd))

    def _tests(self, header: frames.Header, paths: list[str], *, rewrite: bool = True) -> Answer:
        # code that shares the process of the tests must guess this before it can add a record
        mark = secrets.token_hex(16)

        def work(result_fd: int) -> int:
            def emit(record: Record) -> None:
                os.write(result_fd, f"{mark}{json.dumps(record)}\n".encode())

            return 0 if self._warm.full.run(paths, emit, rewrite=rewrite) else 1

        finished = processes.run(work, self._call_limits(header), max_result_bytes=MAX_RESULT_BYTES)
        answer, parts = self._ran(finished)
        return {**answer, "records": _records(bytes(finished.results), mark)}, parts

    def _ran(self, finished: processes.Finished) -> Answer:
        return {
            "exit_status": finished.exit_status,
            "signal": finished.signal,
            "limit_hit": finished.limit_hit,
            "seconds": finished.seconds,
            "output": finished.output.text(),
            "cut": finished.output.total_bytes > self._limits["output_bytes"],
        }, ()

    def _call_limits(self, header: frames.Header) -> processes.Limits:
        names = ("cpu_s", "memory_bytes", "num_processes", "file_size_bytes", "output_bytes")
        return processes.Limits(wall_s=header["wall_s"], **{name: self._limits[name] for name in names})


def _raise_time_is_up(number: int, frame: object) -> None:
    raise TimeIsUp


def _is_test_file(path: str) -> bool:
    *folders, name = path.split("/")
    if any(folder.startswith(".") for folder in folders):
        return False
    return (name.startswith("test_") and name.endswith(".py")) or name.endswith("_test.py")


def _records(results: bytes, mark: str) -> list[Any]:
    prefix = mark.encode()
    records = []
    for line in results.split(b"\n"):
        if line.startswith(prefix):
            try:
                records.append(json.loads(line[len(prefix) :]))
            except ValueError:
                continue
    return records
