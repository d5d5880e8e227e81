"""Everything Megatron-Core needs adapted to run without a GPU, and nothing else knows about it.

Megatron names the GPU directly in a few modules: `torch.cuda.current_device()`, `device="cuda"`, the
string "torch.cuda.FloatTensor". `install` gives those modules, and only those, a stand-in for the name
`torch` that answers with the CPU. `torch` itself is never changed: replacing its factories would break
other libraries of the process without a word (weights loaded under a meta device come out wrong).

Invariants: `install` is idempotent, does nothing where a GPU is present, and touches no module outside
`megatron.core`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")

_MODULES = (
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "transformer.utils",
    "utils",
)

_FACTORIES = frozenset(
    {"arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like"}
)


def is_needed() -> bool:
    """True on a machine without a GPU."""
    return not torch.cuda.is_available()


def install() -> None:
    """Adapt Megatron's modules to the CPU, where there is no GPU; a second call changes nothing."""
    if not is_needed():
        return
    with quiet_import():
        modules = [importlib.import_module(f"megatron.core.{name}") for name in _MODULES]
    stand_in = _CpuTorch()
    for module in modules:
        if not isinstance(module.__dict__["torch"], _CpuTorch):
            module.__dict__["torch"] = stand_in
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.__dict__["_get_cuda_rng_state"] = _get_rng_state
    random.__dict__["_set_cuda_rng_state"] = _set_rng_state


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silence what importing Megatron warns about: optional GPU packages that are not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gpu_type_names() -> AbstractContextManager[object]:
    """Within it, `tensor.type()` names the GPU type: Megatron's optimizers compare that string."""
    return _GpuTypeNames() if is_needed() else nullcontext()


class _CpuTorch:
    """Stands for the module `torch`: asks for a GPU are answered with the CPU, the rest passes through."""

    def __init__(self) -> None:
        self.cuda = _CpuCuda()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in _FACTORIES:
            value = _on_cpu(value)
        # Kept, so that the next look-up costs what it costs on the real module.
        self.__dict__[name] = value
        return value


class _CpuCuda:
    """Stands for `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    @staticmethod
    def synchronize(device: object = None) -> None:
        """Nothing runs behind our back on a CPU."""

    @staticmethod
    def empty_cache() -> None:
        """There is no GPU cache."""

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class _GpuTypeNames(TorchFunctionMode):
    """Rewrites the answer of `tensor.type()` and nothing else."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)
