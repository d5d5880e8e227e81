"""Sandboxes: the protocol, the bubblewrap backend, limits, sessions and the boot-time self-attack."""
