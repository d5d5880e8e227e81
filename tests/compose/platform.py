"""A platform that docker-compose started, as an operator and a caller see it."""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from practicum.cli.ports import free_port
from tests.compose import images
from tests.compose.docker import Docker

Json = dict[str, Any]
HEALTHY_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A running project."""

    docker: Docker
    folder: Path  # the clone that it was started from
    project: str
    url: str
    token: str

    def compose(self, *arguments: str, check: bool = True) -> str:
        """What `docker-compose ARGUMENTS` printed."""
        return self.docker.run(
            "docker-compose", "--project-name", self.project, *arguments, folder=self.folder, check=check
        )

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers, ended ones included."""
        return self.compose("ps", "--quiet", "--all", service).split()

    def inspect(self, container: str) -> Json:
        """Everything the engine knows of a container."""
        parsed: list[Json] = json.loads(self.docker.docker("inspect", container))
        return parsed[0]

    def wait_until_healthy(self, *services: str) -> None:
        """Until the health check of every container of the services holds."""

        def healthy() -> bool:
            states = [self.inspect(one)["State"] for name in services for one in self.containers(name)]
            return all(state.get("Health", {}).get("Status") == "healthy" for state in states)

        wait_for(healthy, HEALTHY_TIMEOUT_S)

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Json:
        """A call through the gateway; a service that restarts is asked again until it answers."""
        answers: list[httpx.Response] = []

        def answered() -> bool:
            answers.append(self.ask(method, path, json=body, params=query))
            return answers[-1].status_code not in (502, 503, 504)

        wait_for(answered, HEALTHY_TIMEOUT_S)
        assert answers[-1].is_success, f"{method} {path}: {answers[-1].status_code} {answers[-1].text}"
        parsed: Json = answers[-1].json()
        return parsed

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One call through the gateway, whatever it answers."""
        headers = {"Authorization": f"Bearer {self.token}", **options.pop("headers", {})}
        return httpx.request(
            method, self.url + path, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False, **options
        )

    def metric(self, container: str, name: str) -> float:
        """The sum of a metric over its labels, as one container tells it."""
        code = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/metrics').read().decode())"
        lines = self.docker.docker("exec", container, "python", "-c", code).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))

    def last_words(self) -> str:
        """How the containers are, and the end of what each wrote."""
        states = self.compose("ps", "--all", check=False)
        return states + self.compose("logs", "--no-color", "--tail=60", check=False)

    def sql(self, query: str) -> list[list[str]]:
        """The rows of a query, as text, asked of PostgreSQL itself."""
        command = (
            'PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE") exec psql -h 127.0.0.1 -U practicum -AtF "|" -c "$0"'
        )
        printed = self.compose("exec", "-T", "postgres", "sh", "-c", command, query)
        return [line.split("|") for line in printed.splitlines()]


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    """Until the condition holds; an `AssertionError` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s:.0f} s"
        time.sleep(0.5)


def settings(port: int) -> dict[str, str]:
    """The variables that a site without an image registry sets."""
    return {
        "PRACTICUM_BASE_IMAGE": images.BASE,
        "PRACTICUM_PIP_NO_INDEX": "1",
        "PRACTICUM_REDIS_IMAGE": images.REDIS,
        "PRACTICUM_POSTGRES_IMAGE": images.POSTGRES,
        "PRACTICUM_PORT": str(port),
        **{f"PRACTICUM_{part.upper()}_IMAGE": f"practicum-test-{part}" for part in images.BUILT},
    }


@contextmanager
def running_platform(docker: Docker, folder: Path, *up: str) -> Iterator[Platform]:
    """The platform from `docker-compose up` to `down -v`."""
    port = free_port()
    docker = docker.with_environment(settings(port))
    docker.run("sh", "infra/secrets/make.sh", folder=folder)
    platform = Platform(
        docker=docker,
        folder=folder,
        project=f"practicum-test-{secrets.token_hex(4)}",
        url=f"http://127.0.0.1:{port}",
        token=(folder / "infra/secrets/access/services").read_text().strip(),
    )
    try:
        platform.compose("up", "--detach", "--build", *up)  # as an operator does; every layer is there
        platform.wait_until_healthy("gateway", "rollout", "reward", "trainer", "engine")
    except BaseException:
        print(platform.last_words())
        platform.compose("down", "--volumes")
        raise
    try:
        yield platform
    finally:
        platform.compose("down", "--volumes", "--timeout", "60")
