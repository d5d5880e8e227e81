"""The images under test, made as a site without an image registry would make them.

A base of Debian's own packages stands in for python:3.11-slim. All wheels are fetched beforehand by this
machine's pip into the wheelhouse, so that the builds need no index, no certificate and no setting of it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from practicum.cli.main import REPOSITORY
from tests.compose.docker import Docker

BASE = "practicum-test-base"
REDIS = "practicum-test-redis"
POSTGRES = "practicum-test-postgres"
SERVICES = ("rollout", "reward", "trainer")
BUILT = (*SERVICES, "engine", "gateway")  # what docker-compose.yml builds
ALL = (*(f"practicum-test-{part}" for part in BUILT), REDIS, POSTGRES, BASE)
# Debian's Python is 3.11.2; below 3.11.3 the client of Redis needs a package that the lock does not name.
_FOR_AN_OLDER_PYTHON = "async-timeout"
_STANDIN = Path(__file__).parent / "standin"
_LEFT_OUT = ("./var/cache/apt/*", "./var/lib/apt/lists/*", "./usr/share/doc/*", "./usr/share/locale/*")


def clone(folder: Path) -> None:
    """What a fresh clone of this working tree holds."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=60).stdout
    for name in filter(None, listed.decode().split("\0")):
        source = REPOSITORY / name
        if source.is_file() and not source.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)


def fill_wheelhouse(folder: Path) -> None:
    """Every wheel that an image needs, by this machine's pip and its settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += ["--dest", "wheelhouse", "--constraint", "requirements/lock.txt"]
    command += [f".[{','.join([*SERVICES, 'engine'])}]", "setuptools", _FOR_AN_OLDER_PYTHON]
    subprocess.run(command, cwd=folder, check=True, timeout=1800)
    for made in (folder / "wheelhouse").glob("practicum-*"):
        made.unlink()


def make_base(docker: Docker, folder: Path) -> None:
    """A Debian with Python and nothing of this machine, as the image `BASE`."""
    root, packed = folder / "base", folder / "base.tar"
    folder.mkdir()
    docker.run(
        "debootstrap",
        "--variant=minbase",
        "--include=python3,python3-venv,ca-certificates",
        "bookworm",
        str(root),
        "http://deb.debian.org/debian",
    )
    docker.run(
        "tar",
        f"--directory={root}",
        f"--file={packed}",
        *(f"--exclude={name}" for name in _LEFT_OUT),
        "-c",
        ".",
    )
    docker.docker("import", str(packed), BASE)
    shutil.rmtree(folder)


def build_standins(docker: Docker) -> None:
    """The images that stand in for Redis and PostgreSQL."""
    for tag, name in ((REDIS, "redis"), (POSTGRES, "postgres")):
        file = str(_STANDIN / f"{name}.Dockerfile")
        docker.docker(
            "build", "--build-arg", f"BASE_IMAGE={BASE}", "--tag", tag, "--file", file, str(_STANDIN)
        )


def size_bytes(docker: Docker, image: str) -> int:
    """What an image takes on disk."""
    return int(docker.docker("image", "inspect", "--format", "{{.Size}}", image))
