"""Placeholder for SGLang's native CPU kernels, which no package registry carries as a CPU build.

With SGLANG_USE_CPU_ENGINE=1 some SGLang modules import kernels by name when they are loaded, for features
(speculative decoding) that this project never turns on; on a CPU without AMX the layers that do run use
plain torch instead.  So every name of a CPU kernel can be imported from here, and calling one is an error
that says which kernel was missing, rather than a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

KERNEL_SUFFIX = "_cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith(KERNEL_SUFFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing_kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{__name__}.{name} needs SGLang's native CPU kernels, which are not installed"
        )

    missing_kernel.__name__ = missing_kernel.__qualname__ = name
    return missing_kernel
