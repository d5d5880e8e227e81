"""Named attacks on a sandbox. Each also runs where its protection is absent, to show that it can succeed."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from practicum.errors import SandboxError
from services.reward.sandbox.base import Ran, Sandbox, Session
from services.reward.sandbox.bubblewrap import BubblewrapSandbox
from services.reward.sandbox.bwrap_command import namespace_advice
from services.reward.sandbox.limits import MEBIBYTE, SandboxLimits
from services.reward.sandbox.self_check import attack_all, require_safe
from tests.fixtures.reward import LIMITS, files

T = TypeVar("T")
PLANTER = "planter-of-test"  # a process name: at most 15 characters
GENEROUS = replace(
    LIMITS, memory_bytes=2048 * MEBIBYTE, num_processes=200, file_size_bytes=64 * MEBIBYTE, cpu_s=30
)


async def inside(sandbox: Sandbox, code: str, limits: SandboxLimits = LIMITS, wall_s: float = 5) -> Ran:
    """Runs an attack in a session of its own."""
    session = await sandbox.open("attack", limits)
    try:
        return await session.run_python(code, wall_s=wall_s)
    finally:
        await session.close()


async def until(condition: Callable[[], T]) -> T:
    """What the condition gives once it is neither empty nor 0."""
    async with asyncio.timeout(20):
        while not (found := await asyncio.to_thread(condition)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


def outside(code: str) -> str:
    """What the same code prints in a plain process of the host."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    return done.stdout


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listener of the host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def witness() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the host with a secret in its environment."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "WITNESS": "secret-of-the-host"})
    yield process
    process.kill()
    process.wait()


async def test_attack_tcp_to_the_host(sandbox: Sandbox, listener: socket.socket) -> None:
    code = (
        "import socket\ntry:\n"
        f"    socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), timeout=1); print('reached')\n"  # noqa: E501
        "except OSError: print('held')\n"
    )
    assert outside(code) == "reached\n"
    assert (await inside(sandbox, code)).output == "held\n"


async def test_attack_abstract_socket_of_the_host(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(b"\0practicum-attack")
        server.listen()
        code = (
            "import socket\ntry:\n    socket.socket(socket.AF_UNIX).connect(b'\\0practicum-attack'); print('reached')\n"  # noqa: E501
            "except OSError: print('held')\n"
        )
        assert outside(code) == "reached\n"
        assert (await inside(sandbox, code)).output == "held\n"


async def test_attack_write_to_the_host(sandbox: Sandbox, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'owned')!r}, 'w').write('x'); print('wrote')"
    assert outside(code) == "wrote\n"
    (tmp_path / "owned").unlink()
    assert "wrote" not in (await inside(sandbox, code)).output
    assert os.listdir(tmp_path) == []


async def test_attack_change_the_system(sandbox: Sandbox) -> None:
    code = (
        "import os\nfor place in ('/', '/usr/bin', '/etc', '/dev', '/opt/practicum/inside', os.path.dirname(os.__file__)):\n"  # noqa: E501
        "    try:\n        open(place + '/owned', 'w'); print('wrote', place)\n    except OSError: pass\n"
        "for place in ('/tmp', '/work'):\n    open(place + '/owned', 'w'); print('may', place)\n"
    )
    assert (await inside(sandbox, code)).output == "may /tmp\nmay /work\n"


async def test_attack_read_files_of_the_host(sandbox: Sandbox) -> None:
    secret = Path(__file__)
    code = f"import os\nprint(os.path.exists({str(secret)!r}), os.path.exists('/etc/passwd'), os.listdir('/work'))"  # noqa: E501
    assert outside(f"import os\nprint(os.path.exists({str(secret)!r}))") == "True\n"
    assert (await inside(sandbox, code)).output == "False False []\n"


async def test_attack_see_and_signal_host_processes(
    sandbox: Sandbox, witness: subprocess.Popen[bytes]
) -> None:
    code = (
        "import os\npids = [p for p in os.listdir('/proc') if p.isdigit()]\n"
        f"try: os.kill({witness.pid}, 0); print('signalled')\nexcept OSError: print('held', len(pids))\n"
    )
    assert outside(code) == "signalled\n"
    assert (await inside(sandbox, code)).output == "held 2\n"


async def test_attack_read_the_environment_of_the_host(
    sandbox: Sandbox, witness: subprocess.Popen[bytes]
) -> None:
    code = (
        "import glob, os\nfound = 'secret-of-the-host' in str(os.environ)\n"
        "for path in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try: found = found or 'secret-of-the-host' in open(path).read()\n    except OSError: pass\nprint(found)\n"  # noqa: E501
    )
    assert outside(code) == "True\n"
    assert (await inside(sandbox, code)).output == "False\n"


async def test_attack_memory_over_all_processes(sandbox: Sandbox) -> None:
    # No process passes RLIMIT_AS; together they pass the limit.
    code = (
        "import os, time\nfor n in range(6):\n    if os.fork() == 0:\n        held = b'x' * (60 << 20)\n"
        "        time.sleep(1)\n        os._exit(0)\nfor n in range(6): os.wait()\nprint('held 360 MiB')\n"
    )
    assert (await inside(sandbox, code, GENEROUS)).output == "held 360 MiB\n"
    ran = await inside(sandbox, code)
    assert (ran.limit_hit, ran.exit_status) == ("memory", None)


async def test_attack_memory_through_files(sandbox: Sandbox) -> None:
    code = "for n in range(40):\n    with open(f'/tmp/{n}', 'wb') as f: f.write(b'x' * (10 << 20))\nprint('wrote 400 MiB')\n"  # noqa: E501
    ran = await inside(sandbox, code)
    assert "wrote 400 MiB" not in ran.output
    assert ran.limit_hit == "memory" or "No space left" in ran.output


async def test_attack_processes(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nmade = 0\ntry:\n    while made < 150:\n        if os.fork() == 0:\n            time.sleep(3)\n"  # noqa: E501
        "            os._exit(0)\n        made += 1\nexcept OSError: pass\nprint(made)\n"
    )
    assert int((await inside(sandbox, code, GENEROUS)).output) == 150
    assert int((await inside(sandbox, code)).output) < LIMITS.num_processes


async def test_attack_cpu_time(sandbox: Sandbox) -> None:
    ran = await inside(sandbox, "while True: pass", replace(LIMITS, cpu_s=1), wall_s=6)
    assert ran.limit_hit == "cpu"
    assert ran.seconds < 6


async def test_attack_wall_time_with_signals_ignored(sandbox: Sandbox) -> None:
    code = (
        "import signal, time\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ntime.sleep(60)\n"
    )
    ran = await inside(sandbox, code, wall_s=0.5)
    assert ran.limit_hit == "wall"
    assert ran.seconds < 2


async def test_attack_file_size(sandbox: Sandbox) -> None:
    limits = replace(LIMITS, file_size_bytes=MEBIBYTE)
    code = "with open('/tmp/x', 'wb') as f:\n    f.write(b'x' * (4 << 20))\nprint('wrote')"
    assert (await inside(sandbox, code, GENEROUS)).output == "wrote\n"
    assert "wrote" not in (await inside(sandbox, code, limits)).output


async def test_attack_leave_the_fork_server_through_its_folder(sandbox: Sandbox) -> None:
    code = "import os\nprint(os.getcwd(), os.listdir('.'))\nos.chdir('..')\nprint(os.listdir('work'))"
    first = await sandbox.open("a", LIMITS)
    second = await sandbox.open("b", LIMITS)
    await first.lay_out(files({"mine": "x"}), pristine=True)
    ran = await second.run_python(code, wall_s=5)
    await first.close()
    await second.close()
    assert ran.output == "/work []\n[]\n"


async def test_attack_another_session(sandbox: Sandbox) -> None:
    first = await sandbox.open("a", LIMITS)
    second = await sandbox.open("b", LIMITS)
    plant = (
        "import os, socket\nfor place in ('/tmp', '/dev/shm', '/work'):\n    open(place + '/planted', 'w').write('x')\n"  # noqa: E501
        "server = socket.socket(socket.AF_UNIX)\nserver.bind(b'\\0planted')\nserver.listen()\nprint('planted', flush=True)\n"  # noqa: E501
        f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{PLANTER}')  # its name, which the host sees\n"
        "time.sleep(20)\n"
    )
    look = (
        "import os, socket\nprint([p for p in ('/tmp', '/dev/shm', '/work') if os.path.exists(p + '/planted')])\n"  # noqa: E501
        "try: socket.socket(socket.AF_UNIX).connect(b'\\0planted'); print('reached')\nexcept OSError: print('held')\n"  # noqa: E501
    )
    async with asyncio.TaskGroup() as both:
        planting = both.create_task(first.run_python(plant, wall_s=20))
        planter = await until(lambda: _process_named(PLANTER))  # now it is all there to be found
        looked = await second.run_python(look, wall_s=5)
        assert _process_named(PLANTER) == planter  # and still is
        os.kill(planter, signal.SIGKILL)
    left = await first.run_python(look, wall_s=5)
    await first.close()
    await second.close()
    assert planting.result().output == "planted\n"
    assert looked.output == "[]\nheld\n"
    assert left.output.startswith(
        "['/tmp', '/dev/shm', '/work']"
    )  # the attack can succeed: in its own session


async def test_attack_the_supervisor(sandbox: Sandbox) -> None:
    code = (
        "import ctypes, os, signal\nfor n in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV):\n"  # noqa: E501
        "    os.kill(1, n)\nlibc = ctypes.CDLL(None)\nprint(libc.ptrace(16, 1, 0, 0))\n"
        "try: open('/proc/1/mem', 'rb'); print('memory')\nexcept OSError: print('held')\n"
        "print(os.listdir('/proc/self/fd'))\n"
    )
    session = await sandbox.open("supervisor", LIMITS)
    ran = await session.run_python(code, wall_s=5)
    assert ran.output.startswith("-1\nheld\n")
    assert len(ran.output.splitlines()[2].split(",")) <= 5  # 0, 1, 2, the result pipe and the listing itself
    assert (await session.run_python("print('well')", wall_s=5)).output == "well\n"
    await session.close()


async def test_attack_privileges(sandbox: Sandbox) -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'tmpfs', b'/usr', b'tmpfs', 0, None), libc.umount2(b'/work', 2))\n"  # noqa: E501
        "status = dict(l.split(':', 1) for l in open('/proc/self/status') if ':' in l)\n"
        "print({status[n].strip() for n in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')}, status['NoNewPrivs'].strip())\n"  # noqa: E501
    )
    assert (await inside(sandbox, code)).output == "-1 -1 -1\n{'0000000000000000'} 1\n"


async def test_attack_forged_frames_reach_nobody(sandbox: Sandbox) -> None:
    # Whatever descriptors the policy writes to, the next call is answered by the supervisor.
    code = (
        "import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'\\0' * 64)\n    except OSError: pass\n"
    )
    session = await sandbox.open("frames", LIMITS)
    await session.run_python(code, wall_s=5)
    assert (await session.run_python("print('well')", wall_s=5)).output == "well\n"
    await session.close()


async def test_close_ends_every_process(sandbox: Sandbox) -> None:
    before = await asyncio.to_thread(_num_processes)
    session = await sandbox.open("close", LIMITS)
    running = asyncio.create_task(session.run(["sh", "-c", "setsid sleep 61 & sleep 62"], wall_s=30))
    await until(lambda: _num_processes() >= before + 3)
    await session.close()
    assert await asyncio.to_thread(_num_processes) == before
    with pytest.raises(SandboxError):
        await running


def _process_named(name: str) -> int:
    """The id of the process with this name on the host; 0 for none."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                return int(pid)
    return 0


def _num_processes() -> int:
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += b"sleep\x006" in command or b"sh\x00-c\x00setsid sleep 61" in command
    return found


async def test_self_check_holds_and_names_every_attack(sandbox: Sandbox) -> None:
    findings = await require_safe(sandbox)
    assert {finding.attack for finding in findings} == {
        "network",
        "write_outside",
        "see_host_processes",
        "read_service_environment",
        "memory_limit",
        "process_limit",
        "signal_the_supervisor",
        "become_root",
    }


async def test_self_check_refuses_a_backend_without_walls() -> None:
    findings = await attack_all(_NoWalls())
    succeeded = {finding.attack for finding in findings if finding.succeeded}
    assert {"network", "write_outside", "see_host_processes", "read_service_environment"} <= succeeded
    with pytest.raises(SandboxError, match="network"):
        await require_safe(_NoWalls())


def test_forbidden_namespaces_name_the_setting(tmp_path: Path) -> None:
    forbidding, allowing = tmp_path / "forbidding", tmp_path / "allowing"
    forbidding.write_text("0\n")
    allowing.write_text("15000\n")
    switches = ((str(forbidding), "0", "sysctl -w a=1"), (str(allowing), "0", "sysctl -w b=1"))
    assert namespace_advice(switches) == "sysctl -w a=1"


class _NoWallsSession:
    """Runs code in a plain process of the host: what the self-check must catch."""

    async def run_python(self, code: str, *, wall_s: float) -> Ran:
        output = "HELD"
        if "os.fork()" not in code and "ctypes" not in code:  # bombs and signals are not for the host
            harmless = code.replace("places + [os.path.dirname(os.__file__)]", "places[-1:]")
            assert ("places = " in code) == (harmless != code)
            output = await asyncio.to_thread(outside, harmless)
        return Ran(exit_status=0, limit_hit="", seconds=0.0, output=output, cut=False)

    async def close(self) -> None:
        return None


class _NoWalls(BubblewrapSandbox):
    """A backend whose sessions are no sandboxes."""

    async def open(
        self, session_id: str, limits: SandboxLimits, *, link: socket.socket | None = None
    ) -> Session:
        bare: Any = _NoWallsSession()  # as much of a session as the self-check uses
        made: Session = bare
        return made
