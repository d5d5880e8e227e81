"""Fixtures of the deployment's tests: an engine, images, one running platform; where the time went."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.compose import images
from tests.compose.docker import Docker, docker_engine, install_packages
from tests.compose.platform import Platform, running_platform, settings

_seconds: dict[str, float] = {}
_sizes: dict[str, int] = {}


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Adds what the block takes to the part's time in the summary."""
    started_s = time.monotonic()
    try:
        yield
    finally:
        _seconds[part] = _seconds.get(part, 0.0) + time.monotonic() - started_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went, and how large the images are."""
    if not _seconds:
        return
    terminalreporter.section("deployment")
    for part, seconds in _seconds.items():
        terminalreporter.write_line(f"{part:<28} {seconds:7.1f} s")
    for image, size in _sizes.items():
        terminalreporter.write_line(f"image {image:<22} {size / 1e6:7.0f} MB")


@pytest.fixture(scope="session")
def docker(request: pytest.FixtureRequest) -> Iterator[Docker]:
    """An engine; skips where `--compose` is not given."""
    if not request.config.getoption("--compose"):
        pytest.skip("needs a Docker engine: make test-compose")
    with ExitStack() as stack:
        # Gigabytes of layers: not in pytest's own folders, which it keeps.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="practicum-docker-")))
        with timed("packages and engine"):
            install_packages()
            docker = stack.enter_context(docker_engine(folder))
        yield docker.with_environment(settings(0))


@pytest.fixture(scope="session")
def clone(docker: Docker) -> Iterator[Path]:
    """A fresh clone whose images are built, with wheels of this machine in its wheelhouse."""
    with TemporaryDirectory(prefix="practicum-clone-") as name:
        folder = Path(name)
        images.clone(folder)
        with timed("base image"):
            images.make_base(docker, folder / "build")
        with timed("stand-ins"):
            images.build_standins(docker)
        with timed("wheels"):
            images.fill_wheelhouse(folder)
        for part in images.BUILT:
            with timed(f"build {part}"):
                docker.run("docker-compose", "build", "--quiet", part, folder=folder)
        for image in images.ALL:
            _sizes[image] = images.size_bytes(docker, image)
        yield folder
        docker.docker("image", "rm", "--force", *images.ALL)


@pytest.fixture(scope="session")
def platform(request: pytest.FixtureRequest, docker: Docker, clone: Path) -> Iterator[Platform]:
    """The platform, up and healthy; its last words are shown where a test failed."""
    with ExitStack() as stack:
        with timed("up until healthy"):
            platform = stack.enter_context(running_platform(docker, clone))
        yield platform
        if request.session.testsfailed:
            print(platform.last_words())
        with timed("down"):
            stack.close()
