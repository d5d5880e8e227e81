"""What SQL must know about weights before an engine is touched, and the promise of whoever keeps it.

Every load of weights on an engine is on record with a label of its own. A label is used once, so it alone
says whether a token that carries it may be data: only where the load is proven. Whoever changes weights holds
the lease; every write names its fence, so that a holder which was given up for dead can prove nothing.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from practicum.errors import EngineError


class LeaseLost(EngineError):
    """Another replica changes the weights by now: this one was given up for dead."""


class LoadState(StrEnum):
    """What is known about a load of weights on an engine."""

    PENDING = "pending"  # begun: the engine may hold anything, and may be paused
    PROVEN = "proven"
    REFUSED = "refused"  # the publisher's probes spoke against it
    FAILED = "failed"  # it was not brought to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One set of weights and where it lies."""

    run_id: str  # empty for the model the engines started with
    weight_version: int
    path: str
    manifest_sha256: str = ""
    # What an engine that started with them calls them; empty for published ones, named anew at each load.
    label: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of weights on one engine."""

    label: str
    engine_url: str
    weights: Serving
    state: LoadState


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsView:
    """What is on record at one moment."""

    serving: Serving | None  # None = nothing was ever served
    is_proven: bool  # what is served was compared with its publisher's probes
    fence: int  # of the lease under which that was served
    holder: str  # who may change weights now; empty = nobody
    pending_urls: frozenset[str]  # engines with a load that came to no end yet


class WeightRecords(Protocol):
    """The records, shared by all replicas. What takes a fence raises `LeaseLost` where it is not the last."""

    async def look(self) -> WeightsView:
        """Everything but the loads that are settled."""
        ...

    async def take_lease(self, holder: str) -> int | None:
        """The fence of a lease taken now; None = another replica, which is alive, holds it."""
        ...

    async def give_lease_back(self, fence: int) -> None:
        """Free the lease; one that was lost is no error."""
        ...

    async def begin_load(self, fence: int, engine_url: str, weights: Serving) -> str:
        """Put a pending load on record; its label, never used before. Earlier pending ones there failed."""
        ...

    async def conclude(self, fence: int, label: str, state: LoadState) -> None:
        """Settle a load. A refused one takes back what was taken for proven without probes."""
        ...

    async def serve(self, fence: int, weights: Serving, *, is_proven: bool) -> None:
        """Replace what is served."""
        ...

    async def find(self, label: str) -> Load | None:
        """The load behind a label; None = no replica gave that name."""
        ...

    async def is_refused(self, run_id: str, weight_version: int) -> bool:
        """Whether probes spoke against the version and it was not proven since."""
        ...
