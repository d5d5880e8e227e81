"""Memory in huge pages: a decode step reads the keys and values of every running request, and
small pages cost it a fifth of its time.

Owns: one allocation function. Where the system has no huge pages it gives ordinary ones.
"""

import math
import mmap

import torch


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose pages are handed out when they are first written."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
