"""The system calls that Python has no name for: namespaces, mounts, capabilities, safe path resolution.

Owns every ctypes call of the sandbox. Each function raises `OSError` where the kernel refuses.
"""

import ctypes
import os
import platform
from pathlib import Path

NEW_NAMESPACES = (
    0x00020000  # mounts
    | 0x04000000  # host name
    | 0x08000000  # System V and POSIX message queues
    | 0x10000000  # users
    | 0x20000000  # processes
    | 0x40000000  # network
)
MS_NOSUID_NODEV = 0x2 | 0x4
MS_NOEXEC = 0x8
MS_PRIVATE_RECURSIVE = 0x40000 | 0x4000
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_BENEATH = 0x08

_SIGCHLD = 17
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_OPENAT2 = 437  # the same on every architecture
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

# PyDLL keeps the interpreter lock: a child made by a raw clone must own it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork_into_new_namespaces() -> int:
    """Like `os.fork`, but the child is process 1 of fresh namespaces and has every right inside them.

    One clone costs half of fork + unshare + fork. The caller must have a single thread.
    """
    number = _SYS_CLONE.get(platform.machine())
    if number is None:
        raise OSError(f"no sandbox for the architecture {platform.machine()}")
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(ctypes.c_long(number), ctypes.c_long(NEW_NAMESPACES | _SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _checked(pid, "clone")


def map_single_user(inside_id: int, outside_uid: int, outside_gid: int) -> None:
    """Maps one user and one group of the new user namespace to the ones outside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside_id} {outside_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{inside_id} {outside_gid} 1")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    source_b, target_b, kind_b, options_b = encoded
    result = _libc.mount(source_b, target_b, kind_b, ctypes.c_ulong(flags), options_b)
    _checked(result, f"mount {target}")


def set_host_name(name: str) -> None:
    """sethostname(2), in this namespace only."""
    _checked(_libc.sethostname(name.encode(), len(name)), "sethostname")


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may trace this one and read its memory."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl dumpable")


def drop_capabilities() -> None:
    """Gives up every capability for good, here and in every child."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # past the last one this kernel knows
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, nothing), "capset")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl no_new_privs")


def open_beneath(folder_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2(2): opens a path that never leaves the folder, links included.

    Raises `OSError` with EXDEV where the path, after resolving its links, would leave.
    """
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    result: int = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2),
        ctypes.c_long(folder_fd),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.byref(how),
        ctypes.c_long(ctypes.sizeof(how)),
    )
    return _checked(result, path)
