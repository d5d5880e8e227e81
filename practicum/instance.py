"""What a replica of a service calls itself where it is told nothing."""

import socket

MAX_NAME_LENGTH = 200


def instance_name(service: str) -> str:
    """A name from the machine's: containers of one service differ in it, and each keeps it over a restart."""
    return f"{service}-{socket.gethostname()}"[:MAX_NAME_LENGTH]
