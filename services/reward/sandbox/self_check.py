"""The attack on ourselves before serving: a backend that lets one through does not serve.

Each attack is code that runs in a real session the way a policy's code would, and tries to do harm. What it
prints is not believed where the service can see for itself: a listener that was reached, a file that
appeared on the host.
"""

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from practicum.errors import SandboxError
from services.reward.sandbox.base import Sandbox, Session
from services.reward.sandbox.limits import MEBIBYTE, SandboxLimits

WALL_S = 5.0
_BROKE_OUT = "BROKE OUT"
_LIMITS = replace(SandboxLimits(), memory_bytes=256 * MEBIBYTE, num_processes=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one attack achieved."""

    attack: str
    succeeded: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Things on the host for the attacks to reach."""

    port: int
    marker: str  # in the environment and the arguments of a process of the host
    folder: str  # a folder of the host that everyone may write to
    reached: list[str]  # what the listener saw


async def attack_all(sandbox: Sandbox) -> list[Finding]:
    """Runs every attack. Raises `SandboxError` where a session cannot even be made."""
    findings = []
    async with _target() as target:
        for name, code in attacks(target).items():
            session = await sandbox.open(f"self-check/{name}", _LIMITS)
            try:
                findings.append(await _attack(session, name, code, target))
            finally:
                await session.close()
    return findings


async def require_safe(sandbox: Sandbox) -> list[Finding]:
    """Raises `SandboxError` that names every attack that succeeded."""
    findings = await attack_all(sandbox)
    broken = [f"{finding.attack} ({finding.detail})" for finding in findings if finding.succeeded]
    if broken:
        raise SandboxError(f"the sandbox {sandbox.name} does not hold: {'; '.join(broken)}")
    return findings


def attacks(target: Target) -> dict[str, str]:
    """Python code by the attack's name; each prints the words of success where it succeeds."""
    return {
        "network": _NETWORK.format(port=target.port),
        "write_outside": _WRITE_OUTSIDE.format(folder=target.folder, marker=target.marker),
        "see_host_processes": _SEE_PROCESSES.format(marker=target.marker),
        "read_service_environment": _READ_ENVIRONMENT.format(marker=target.marker),
        "memory_limit": _MEMORY,
        "process_limit": _PROCESSES,
        "signal_the_supervisor": _SIGNAL,
        "become_root": _BECOME_ROOT,
    }


async def _attack(session: Session, name: str, code: str, target: Target) -> Finding:
    ran = await session.run_python(code, wall_s=WALL_S)
    if name == "network" and target.reached:
        return Finding(attack=name, succeeded=True, detail="the service's listener was reached")
    left = os.listdir(target.folder)
    if left:
        return Finding(attack=name, succeeded=True, detail=f"wrote {left[0]} on the host")
    line = next((line for line in ran.output.splitlines() if _BROKE_OUT in line), "")
    if line:
        return Finding(attack=name, succeeded=True, detail=line)
    if "HELD" not in ran.output and not ran.limit_hit and name != "memory_limit":
        # an attack that never ran proves nothing
        return Finding(attack=name, succeeded=True, detail=f"could not be carried out: {ran.output[-300:]}")
    return Finding(attack=name, succeeded=False, detail=ran.limit_hit or "held")


@asynccontextmanager
async def _target() -> AsyncIterator[Target]:
    reached: list[str] = []

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append("connection")
        writer.close()

    marker = f"practicum-{secrets.token_hex(8)}"
    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    witness = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(60)", marker, env={**os.environ, "WITNESS": marker}
    )
    try:
        with tempfile.TemporaryDirectory(prefix="practicum-self-check-") as folder:
            os.chmod(folder, 0o777)
            port = server.sockets[0].getsockname()[1]
            yield Target(port=port, marker=marker, folder=folder, reached=reached)
    finally:
        witness.kill()
        await witness.wait()
        server.close()
        await server.wait_closed()


_NETWORK = """
import socket
reached = []
for address in (("127.0.0.1", {port}), ("10.255.255.254", 80), ("169.254.169.254", 80)):
    try:
        socket.create_connection(address, timeout=0.3).close()
        reached.append(address)
    except OSError:
        pass
names = [name for _, name in socket.if_nameindex() if name != "lo"]
print("BROKE OUT: " + str(reached + names) if reached or names else "HELD")
"""

_WRITE_OUTSIDE = """
import os
written = []
places = ["/", "/usr", "/etc", "/usr/bin", "/opt/practicum/inside", "/dev", "/proc/sys/kernel", {folder!r}]
for place in places + [os.path.dirname(os.__file__)]:
    try:
        with open(os.path.join(place, {marker!r}), "w") as file:
            file.write("x")
        written.append(place)
    except OSError:
        pass
print("BROKE OUT: wrote in " + str(written) if written else "HELD")
"""

_SEE_PROCESSES = """
import os
seen = []
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            command = open("/proc/" + pid + "/cmdline").read()
        except OSError:
            continue
        if {marker!r} in command:
            seen.append(pid)
num = sum(name.isdigit() for name in os.listdir("/proc"))
print("BROKE OUT: %d processes, %s" % (num, seen) if seen or num > 3 else "HELD")
"""

_READ_ENVIRONMENT = """
import os
found = [name for name, value in os.environ.items() if {marker!r} in value or name.startswith("PRACTICUM_")]
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            text = open("/proc/" + pid + "/environ").read()
        except OSError:
            continue
        if {marker!r} in text or "PRACTICUM_" in text:
            found.append(pid)
print("BROKE OUT: " + str(found) if found else "HELD")
"""

_MEMORY = """
import os
for child in range(8):
    if os.fork() == 0:
        held = []
        for _ in range(12):
            held.append(b"x" * (16 << 20))
        import time
        time.sleep(2)
        os._exit(0)
for child in range(8):
    os.wait()
print("BROKE OUT: 1.5 GiB in use")
"""

_PROCESSES = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        made += 1
except OSError:
    pass
print("BROKE OUT: %d processes" % made if made >= 20 else "HELD")
"""

_SIGNAL = """
import ctypes, os, signal
harm = []
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    try:
        os.kill(1, number)
    except OSError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, 1, 0, 0) == 0:
    harm.append("traced")
try:
    open("/proc/1/mem", "rb").close()
    harm.append("memory")
except OSError:
    pass
print("BROKE OUT: " + str(harm) if harm else "HELD")
"""

_BECOME_ROOT = """
import ctypes, os
harm = []
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) == 0:
    harm.append("user namespace")
if libc.mount(b"tmpfs", b"/usr", b"tmpfs", 0, None) == 0:
    harm.append("mount")
try:
    os.setuid(0)
    harm.append("setuid")
except OSError:
    pass
print("BROKE OUT: " + str(harm) if harm else "HELD")
"""
