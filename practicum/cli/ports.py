"""Free loopback ports for a local stack."""

import socket


def free_port() -> int:
    """A port that was free a moment ago. Whoever binds it next must be quick, or try again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
