"""What a token may do. Each scope includes those before it, so a caller needs one."""

from enum import StrEnum


class Scope(StrEnum):
    """The rights a token carries, from the least to the most."""

    SUBMIT = "submit"  # store suites and tasks, evaluate, demonstrate, read what came of them
    OPERATE = "operate"  # make, hold and end runs, read checkpoints and the platform's inside
    INTERNAL = "internal"  # call the services' gRPC, as they call each other

    def includes(self, needed: "Scope") -> bool:
        """Whether a token with this scope may do what `needed` names."""
        order = list(Scope)
        return order.index(self) >= order.index(needed)
