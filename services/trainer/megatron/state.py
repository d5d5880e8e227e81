"""What a run continues from: master weights, optimizer moments, random state and the step.

One file of plain tensors, read without running code from it. Megatron's distributed checkpoint is not used:
it writes from forked processes, which a process with gRPC threads must not do, and on one rank there is
nothing to reshard.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from practicum.errors import CheckpointError
from services.trainer.megatron.optimizer import master_weights

STATE_FILE = "optimizer.pt"


def save_state(folder: Path, *, model: torch.nn.Module, optimizer: Any, step: int, precision: str) -> None:
    """Write the state to `folder`, made if absent. Raises `CheckpointError` where it cannot be written."""
    masters = master_weights(model)
    state = {
        "step": step,
        "precision": precision,
        "random_state": torch.get_rng_state(),
        "weights": {name: tensor.detach() for name, tensor in masters.items()},
        # Before the first step the optimizer has no moments.
        "moments": {name: dict(optimizer.state.get(master, {})) for name, master in masters.items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / STATE_FILE)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


@torch.no_grad()
def load_state(folder: Path, *, model: torch.nn.Module, optimizer: Any, precision: str) -> int:
    """Put the state of `folder` into model and optimizer; returns the step.

    Raises `CheckpointError` where the file is missing, unreadable or of another model; nothing has changed
    then.
    """
    path = folder / STATE_FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    masters = master_weights(model)
    _check(path, state, masters, precision)
    for name, param in model.named_parameters():
        master = masters[name]
        master.copy_(state["weights"][name])
        param.copy_(master)
        # Each parameter gets tensors of its own: a shared step counter would be advanced once per parameter.
        moments = {key: value.clone() for key, value in state["moments"][name].items()}
        if moments:
            optimizer.state[master] = moments
        else:
            optimizer.state.pop(master, None)
    torch.set_rng_state(state["random_state"])
    return int(state["step"])


def _check(path: Path, state: Any, masters: Mapping[str, torch.Tensor], precision: str) -> None:
    if not isinstance(state, dict) or state.get("precision") != precision:
        raise CheckpointError(f"{path} is not the state of a {precision} run")
    sizes = {name: tensor.shape for name, tensor in state["weights"].items()}
    if sizes != {name: tensor.shape for name, tensor in masters.items()}:
        raise CheckpointError(f"{path} is the state of another model")
