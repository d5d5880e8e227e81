"""Which keys and values can be used again: the longest common prefix with running and finished requests.

Owns: the index of token prefixes and the store of finished sequences, least recently used first out. Never
holds keys and values of other weights than the served ones: the batcher flushes it in the moment of a swap.

Prefixes are indexed by a chain of block hashes; a hash only proposes a holder, the token ids decide.
"""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

BLOCK = 16  # tokens
_CANDIDATES = 4  # holders of one block that are compared token by token

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


class Holder(Protocol):
    """Whoever holds keys and values for `ids[:num_cached]`."""

    @property
    def cached_ids(self) -> Ids:
        """The token ids whose keys and values are there."""
        ...


H = TypeVar("H", bound=Holder)


class CachedSequence:
    """Keys and values of a finished request: [layers, 2, kv heads, tokens, head_dim]."""

    __slots__ = ("cached_ids", "chain", "kv")

    def __init__(self, ids: Ids, chain: list[int], kv: torch.Tensor) -> None:
        self.cached_ids: Ids = ids
        self.chain = chain
        self.kv = kv


def block_chain(ids: Ids, known: list[int] | None = None) -> list[int]:
    """Hash of each full block together with all before it; `known` is the chain of a prefix of `ids`."""
    chain = list(known or ())
    previous = chain[-1] if chain else 0
    for start in range(len(chain) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
        previous = hash((previous, ids[start : start + BLOCK].tobytes()))
        chain.append(previous)
    return chain


def common_length(left: Ids, right: Ids) -> int:
    """Number of leading ids that are equal."""
    length = min(len(left), len(right))
    different = (left[:length] != right[:length]).nonzero()[0]
    return int(different[0]) if len(different) else length


class PrefixIndex(Generic[H]):
    """Finds the holder that shares the longest prefix with some ids."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[H, None]] = {}

    def add(self, holder: H, chain: list[int]) -> None:
        """Make `holder` known under every block of `chain`."""
        for block in chain:
            self._holders.setdefault(block, {})[holder] = None

    def remove(self, holder: H, chain: list[int]) -> None:
        """Forget what `add` made known."""
        for block in chain:
            holders = self._holders.get(block)
            if holders is not None:
                holders.pop(holder, None)
                if not holders:
                    del self._holders[block]

    def longest(self, ids: Ids, chain: list[int]) -> tuple[H | None, int]:
        """The best holder and the number of leading ids that it covers (0 without one)."""
        last: dict[H, None] | None = None
        for block in chain:
            holders = self._holders.get(block)
            if holders is None:
                break
            last = holders
        best, best_length = None, 0
        for holder in list(reversed(last))[:_CANDIDATES] if last else ():
            length = common_length(holder.cached_ids, ids)
            if length > best_length:
                best, best_length = holder, length
        return best, best_length

    def clear(self) -> None:
        """Forget everything."""
        self._holders.clear()


class PrefixCache:
    """Finished sequences, bounded in tokens."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[CachedSequence, None] = OrderedDict()
        self._index: PrefixIndex[CachedSequence] = PrefixIndex()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def longest(self, ids: Ids, chain: list[int]) -> tuple[CachedSequence | None, int]:
        """The finished sequence that shares the longest prefix with `ids`; it counts as used now."""
        found, length = self._index.longest(ids, chain)
        if found is not None:
            self._sequences.move_to_end(found)
        return found, length

    def insert(self, sequence: CachedSequence, budget: int) -> bool:
        """Keep a sequence if `budget` tokens can hold it, pushing out the least recently used.

        A sequence that another one covers is not kept; one that it covers makes way. True where kept.
        """
        covered, length = self._index.longest(sequence.cached_ids, sequence.chain)
        if covered is not None:
            if length == len(sequence.cached_ids):
                self._sequences.move_to_end(covered)
                return False
            if length == len(covered.cached_ids):
                self._drop(covered)
        if len(sequence.cached_ids) > budget or not sequence.chain:
            return False
        self.shrink(budget - len(sequence.cached_ids))
        self._sequences[sequence] = None
        self._index.add(sequence, sequence.chain)
        self.num_tokens += len(sequence.cached_ids)
        return True

    def shrink(self, budget: int) -> None:
        """Push out the least recently used until at most `budget` tokens are left."""
        while self._sequences and self.num_tokens > budget:
            self._drop(next(iter(self._sequences)))

    def flush(self) -> None:
        """Forget everything."""
        self._sequences.clear()
        self._index.clear()
        self.num_tokens = 0

    def _drop(self, sequence: CachedSequence) -> None:
        del self._sequences[sequence]
        self._index.remove(sequence, sequence.chain)
        self.num_tokens -= len(sequence.cached_ids)
