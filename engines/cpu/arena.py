"""Keys and values of the running requests, one slot each, in one tensor.

Owns: the tensor, its growth, moves between slots. Never knows which request sits where. Invariant: running
requests fill slots 0..n-1 without a hole, so that a decode step reads plain views. Numbers beyond a slot's
length are finite (zeros or old values): attention gives them weight 0, and 0 times NaN would poison the row.
"""

import torch

from engines.cpu import pages
from engines.cpu.config import ModelConfig

_CAPACITY_STEP = 128  # tokens


class KvArena:
    """[layers, 2, slots, kv heads, capacity, head_dim]; index 1 is 0 for keys and 1 for values."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self.num_slots = 0
        self.capacity = 0
        self.tensor = self._new(0, 0)

    def _new(self, num_slots: int, capacity: int) -> torch.Tensor:
        config = self._config
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, capacity, config.head_dim)
        return pages.zeros(shape, self._dtype)

    @staticmethod
    def rounded(num_tokens: int) -> int:
        """The capacity that holds `num_tokens`."""
        return -(-num_tokens // _CAPACITY_STEP) * _CAPACITY_STEP

    def resize(self, num_slots: int, capacity: int, num_used: int) -> None:
        """Take a new shape and keep the first `num_used` slots; `capacity` must hold what they hold."""
        new = self._new(num_slots, capacity)
        kept = min(capacity, self.capacity)
        new[:, :, :num_used, :, :kept] = self.tensor[:, :, :num_used, :, :kept]
        self.tensor, self.num_slots, self.capacity = new, num_slots, capacity

    def read(self, slot: int, length: int) -> torch.Tensor:
        """A view of the first `length` tokens of a slot: [layers, 2, kv heads, length, head_dim]."""
        return self.tensor[:, :, slot, :, :length]

    def write(self, slot: int, kv: torch.Tensor) -> None:
        """Put `kv` (as `read` gives it) at the start of a slot."""
        self.tensor[:, :, slot, :, : kv.shape[3]] = kv

    def swap(self, left: int, right: int, num_left: int, num_right: int, *, discard_left: bool) -> None:
        """Exchange two slots that hold `num_left` and `num_right` tokens, or only bring `right` to `left`."""
        kept = None if discard_left else self.read(left, num_left).clone()
        self.write(left, self.read(right, num_right))
        if kept is not None:
            self.write(right, kept)

    def clear(self, slot: int) -> None:
        """Zero a slot, after a request whose numbers were not finite."""
        self.tensor[:, :, slot] = 0
