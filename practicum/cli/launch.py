"""Becomes another program that the kernel ends when this one's parent dies.

    python -I -S launch.py PARENT_PID COMMAND [ARGUMENT ...]

Run by its path as a program of its own, before the real one: `preexec_fn` would run Python between
fork and exec, which is not safe where the parent has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(parent_pid: int, command: list[str]) -> None:
    """Replace this process by `command`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # The parent died before the kernel was told to watch it.
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
