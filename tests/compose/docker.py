"""A Docker engine for the tests: the one that runs here, else one of the session's own.

Its own engine lies in a temporary folder and is ended by its process id; the packet filter and the forwarding
of the machine are put back as they were.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

START_TIMEOUT_S = 120
COMMAND_TIMEOUT_S = 1800
_PACKAGES = {
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
}
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Docker:
    """An engine, and how to talk to it."""

    host: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, *command: str, folder: Path | None = None, check: bool = True, stdin: int | None = None
    ) -> str:
        """What a command printed, both streams; an `AssertionError` with it where it failed and `check`."""
        ran = subprocess.run(
            command,
            cwd=folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert ran.returncode == 0 or not check, f"{' '.join(command)}\n{ran.stdout[-6000:]}"
        return ran.stdout

    def docker(self, *arguments: str, check: bool = True) -> str:
        """What `docker ARGUMENTS` printed."""
        return self.run("docker", *arguments, check=check)

    def with_environment(self, more: Mapping[str, str]) -> "Docker":
        """The same engine, whose commands see more variables."""
        return Docker(host=self.host, environment={**self.environment, **more})

    def _environment(self) -> dict[str, str]:
        # The classic builder: what is tested must not need more than the engine itself.
        return {**os.environ, "DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "0", **self.environment}


def install_packages() -> None:
    """Debian's packages of what is missing here."""
    missing = [package for command, package in _PACKAGES.items() if shutil.which(command) is None]
    if not missing:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "--quiet", "--quiet"],
        ["apt-get", "install", "--quiet", "--quiet", "--yes", "--no-install-recommends", *missing],
    ):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=environment, timeout=600)


@contextmanager
def docker_engine(folder: Path) -> Iterator[Docker]:
    """The engine that `DOCKER_HOST` or the usual socket answers for, else one of our own in `folder`."""
    running = Docker(host=os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    if _answers(running):
        yield running
        return
    rules = subprocess.run(["iptables-save"], check=True, capture_output=True, timeout=30).stdout
    forwarding = _FORWARDING.read_text()
    with (folder / "dockerd.log").open("wb") as log:
        server = subprocess.Popen(_server_command(folder), stdout=log, stderr=log)
    try:
        docker = Docker(host=f"unix://{folder}/docker.sock")
        _wait_until_up(docker, server, folder / "dockerd.log")
        yield docker
    finally:
        server.terminate()
        server.wait(timeout=120)
        subprocess.run(["ip", "link", "delete", "docker0"], check=False, timeout=30)
        subprocess.run(["iptables-restore"], input=rules, check=True, timeout=30)
        _FORWARDING.write_text(forwarding)


def _server_command(folder: Path) -> Sequence[str]:
    return [
        "dockerd",
        f"--host=unix://{folder}/docker.sock",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/dockerd.pid",
        "--storage-driver=overlay2",
        "--log-level=warn",
    ]


def _answers(docker: Docker) -> bool:
    try:
        return "ServerErrors" not in docker.docker("info", "--format", "{{json .}}", check=True)
    except (AssertionError, FileNotFoundError):
        return False


def _wait_until_up(docker: Docker, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(docker):
        if server.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(
                "the Docker engine did not start:\n" + log.read_text(errors="replace")[-4000:]
            )
        time.sleep(0.2)
