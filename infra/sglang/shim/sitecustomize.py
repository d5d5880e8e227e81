"""Make the published torchvision importable next to a CPU-only torch.

SGLang imports torchvision, and the torchvision on PyPI is linked against CUDA.  Beside a CPU torch its
native library does not load, so the operators it would have defined are missing, and torchvision's own
Python code then fails while registering shape functions for two of them.  Declaring those two schemas
just before torchvision is imported is enough: nothing served here ever calls them.

Python runs a module of this name at interpreter start, in SGLang's spawned worker processes too, so the
folder only has to be on PYTHONPATH.  torch itself is left alone until torchvision is asked for, which
keeps every other interpreter start cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MISSING_OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# A torch Library takes its definitions back when it is collected, so it has to outlive the import.
_kept_alive: list[object] = []


def declare_missing_operators() -> None:
    """Define the schemas that torchvision's native library would have, if torch has no CUDA."""
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in MISSING_OPERATORS:
        library.define(operator + SCHEMA)
    _kept_alive.append(library)


class BeforeTorchvision(MetaPathFinder):
    """Runs the declaration once, on the first import of torchvision, and finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None


sys.meta_path.insert(0, BeforeTorchvision())
