"""The process group and Megatron's parallel state.

Owns their start and their end in this process. One rank: the group's store lives in this process, so no
port is opened for it. Nothing here is done at import.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from services.trainer.megatron import cpu


def initialise(seed: int) -> bool:
    """Start the group and Megatron's parallel state where absent, and seed Megatron's random states.

    Returns True where this call started the group, so that its caller is the one to end it.
    """
    cpu.install()
    with cpu.quiet_import():
        from megatron.core import parallel_state, tensor_parallel

    started = not dist.is_initialized()
    if started:
        backend = "gloo" if cpu.is_needed() else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return started


def shut_down() -> None:
    """End Megatron's parallel state and the process group; a second call changes nothing."""
    with cpu.quiet_import():
        from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
