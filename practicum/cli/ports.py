"""Free loopback ports for a local stack."""

import socket
from contextlib import ExitStack


def free_port() -> int:
    """One port that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports that were free a moment ago; whoever binds them must be quick."""
    with ExitStack() as held:
        # All are held open until the last is chosen: a port given back at once may be given out again.
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
