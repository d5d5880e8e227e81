"""The training backend: one model, one optimizer, one call per step.

Owns the Megatron model, its optimizer and the state they resume from. Never touches the queue, SQL or the
network; never decides which rows are trained (the step does) nor what the loss is
(`services.trainer.algorithms` does).

Invariants:
- any split of the same rows into micro-batches gives the same update, up to float rounding;
- `export` after `load` with no step between writes the same weights, bit for bit, in the source dtype;
- on one rank a run continued from `save_state` equals the uninterrupted one, bit for bit.

Megatron is imported by `load`, not by this module: it takes seconds, and only a process that trains needs it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.errors import InvalidInput
from services.trainer.algorithms.aggregation import divisor_part, weighted_sum
from services.trainer.algorithms.logprobs import entropies, scaled, token_logprobs
from services.trainer.algorithms.objective import (
    Aggregation,
    Objective,
    OffPolicy,
    PolicyObjective,
    token_losses,
)
from services.trainer.algorithms.ratio import within_band
from services.trainer.megatron import folder as hf_folder
from services.trainer.megatron import parallel
from services.trainer.megatron.optimizer import (
    OptimizerConfig,
    apply_gradients,
    build_optimizer,
    learning_rate_at,
    master_weights,
)
from services.trainer.megatron.packing import TrainRow
from services.trainer.megatron.result import StepFigures, StepResult
from services.trainer.megatron.shape import read_shape
from services.trainer.megatron.state import load_state, save_state

if TYPE_CHECKING:
    from services.trainer.megatron.batch import Predictions, TrainBatch
    from services.trainer.megatron.shape import ModelShape

# T row token, U wanted position, K trained token of a micro-batch

__all__ = ["MegatronBackend", "OptimizerConfig", "StepResult", "TrainRow"]

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class MegatronBackend:
    """A Megatron-Core GPTModel with its optimizer, on this process's rank."""

    def __init__(
        self,
        *,
        shape: ModelShape,
        base: hf_folder.BaseFolder,
        model: Any,
        optimizer: Any,
        optimizer_config: OptimizerConfig,
        precision: str,
        microbatch_tokens: int,
        keep_reference: bool,
        owns_group: bool,
    ) -> None:
        """Take parts made by `load`, which is the way in."""
        self.vocab_size = shape.vocab_size
        self.num_parameters = sum(param.numel() for param in model.parameters())
        self._shape = shape
        self._base = base
        self._model = model  # Megatron's DDP around the GPTModel
        self._optimizer = optimizer
        self._optimizer_config = optimizer_config
        self._precision = precision
        self._microbatch_tokens = microbatch_tokens
        self._owns_group = owns_group
        self._step = 0
        self._reference = [param.detach().clone() for param in model.parameters()] if keep_reference else None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        optimizer: OptimizerConfig,
        precision: str = "fp32",
        seed: int = 0,
        microbatch_tokens: int = 8192,
        keep_reference: bool = False,
    ) -> MegatronBackend:
        """Build from a Hugging Face folder (config.json, *.safetensors, tokenizer files).

        `precision` is "fp32" or "bf16" (bf16 compute, fp32 master weights). `keep_reference` keeps a frozen
        copy of the loaded weights, needed where an objective has `kl_coef > 0`. Starts the process group and
        Megatron's parallel state when the process has none. One backend per process trains at a time, and
        all its methods block: call them from one worker thread.

        Raises `InvalidInput` naming the field for a config this model cannot be, `CheckpointError` for
        missing or misshapen weights.
        """
        if precision not in _PRECISIONS:
            raise InvalidInput("precision", f"{precision!r} is not one of {', '.join(_PRECISIONS)}")
        if microbatch_tokens < 1:
            raise InvalidInput("microbatch_tokens", f"must be >= 1, not {microbatch_tokens}")
        from services.trainer.megatron.model import build_model, wrap_for_training
        from services.trainer.megatron.weights import load_into, read_weights, to_megatron

        shape = read_shape(folder)
        base = hf_folder.read_base(folder)
        weights = to_megatron(read_weights(folder), shape)
        owns_group = parallel.initialise(seed)
        model = wrap_for_training(build_model(shape, _PRECISIONS[precision]))
        megatron_optimizer = build_optimizer(optimizer, model, bf16=precision == "bf16")
        load_into(model.module, weights, master_weights(model.module))
        return cls(
            shape=shape,
            base=base,
            model=model,
            optimizer=megatron_optimizer,
            optimizer_config=optimizer,
            precision=precision,
            microbatch_tokens=microbatch_tokens,
            keep_reference=keep_reference,
            owns_group=owns_group,
        )

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self._step

    @property
    def learning_rate(self) -> float:
        """The rate the next step will use."""
        return learning_rate_at(self._step, self._optimizer_config)

    def train(
        self, rows: Sequence[TrainRow], objective: Objective, *, temperature: float = 1.0
    ) -> StepResult:
        """One optimizer step over all rows, whatever number of micro-batches that takes.

        Raises `ValueError` for a malformed row, one longer than `microbatch_tokens`, or an id outside the
        vocabulary; nothing has changed then. With no trained token, or a gradient that is not finite,
        weights, optimizer and step stay as they are and the result says so.
        """
        started_s = time.perf_counter()
        self._check(rows, objective, temperature)
        batches = self._batches([row for row in rows if row.trained_T.any()], objective, temperature)
        figures = StepFigures()
        self._run_schedule(batches, objective, temperature, figures)
        learning_rate = self.learning_rate
        grad_norm, updated, skipped_reason = 0.0, False, "no_trained_tokens"
        if figures.num_kept > 0:
            grad_norm, updated = apply_gradients(
                self._optimizer, learning_rate=learning_rate, clip_grad=self._optimizer_config.clip_grad
            )
            skipped_reason = "" if updated else "non_finite_gradient"
        self._step += updated
        return figures.result(
            step=self._step,
            updated=updated,
            skipped_reason=skipped_reason,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_tokens=sum(row.ids_T.shape[0] for row in rows),
            num_tokens_computed=sum(batch.predictions.ids_N.numel() for batch in batches),
            num_microbatches=len(batches),
            seconds=time.perf_counter() - started_s,
        )

    def _check(self, rows: Sequence[TrainRow], objective: Objective, temperature: float) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be finite and > 0, not {temperature}")
        for row in rows:
            row.check(self.vocab_size)
            if row.ids_T.shape[0] > self._microbatch_tokens:
                raise ValueError(
                    f"row of {row.trajectory_id} has {row.ids_T.shape[0]} tokens, "
                    f"more than microbatch_tokens {self._microbatch_tokens}"
                )
        if isinstance(objective, PolicyObjective) and objective.kl_coef > 0 and self._reference is None:
            raise ValueError("kl_coef > 0 needs a backend loaded with keep_reference")

    def _batches(
        self, rows: Sequence[TrainRow], objective: Objective, temperature: float
    ) -> list[TrainBatch]:
        from services.trainer.megatron.batch import train_batches

        make = partial(
            train_batches,
            rows,
            self._microbatch_tokens,
            objective.aggregation,
            constant_tokens=objective.constant_tokens,
        )
        batches = make()
        if (
            isinstance(objective, PolicyObjective)
            and objective.off_policy is OffPolicy.MASK
            and objective.aggregation is Aggregation.TRAJECTORY_MEAN
            and batches
        ):
            # A trajectory's mean divides by its kept tokens, and its rows may lie in several micro-batches:
            # what is kept must be known before the first of them.
            batches = make(num_kept_by_row=self._num_kept(batches, len(rows), objective, temperature))
        return batches

    def _num_kept(
        self, batches: Sequence[TrainBatch], num_rows: int, objective: PolicyObjective, temperature: float
    ) -> list[int]:
        cap = objective.off_policy_cap
        num_kept = [0] * num_rows
        for batch in batches:
            logprobs_K = self._logprobs(batch.predictions, temperature)
            kept_K = within_band(logprobs_K, batch.rollout_logprobs_K, 1 / cap, cap)
            sizes = batch.predictions.num_tokens_by_row
            for row, kept in zip(
                batch.predictions.row_indices, torch.split(kept_K, list(sizes)), strict=True
            ):
                num_kept[row] = int(kept.sum())
        return num_kept

    def _run_schedule(
        self, batches: Sequence[TrainBatch], objective: Objective, temperature: float, figures: StepFigures
    ) -> None:
        """Forward and backward over all micro-batches; leaves the step's gradient in Megatron's buffers."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from services.trainer.megatron.model import logits_of

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        if not batches:
            return

        def forward_step(batches: Iterator[TrainBatch], model: Any) -> tuple[torch.Tensor, Any]:
            batch = next(batches)
            logits_UV = logits_of(model, batch.predictions.ids_N, batch.predictions.packed)
            return logits_UV, partial(self._loss, batch, objective, temperature, figures)

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=self._microbatch_tokens,
            micro_batch_size=1,
            forward_only=False,
        )

    def _loss(
        self,
        batch: TrainBatch,
        objective: Objective,
        temperature: float,
        figures: StepFigures,
        logits_UV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """Megatron's three-tuple: the micro-batch's loss sum, its part of the divisor, and nothing to log."""
        predictions = batch.predictions
        logits_UV = scaled(logits_UV, temperature)
        losses = token_losses(
            objective,
            token_logprobs(logits_UV, predictions.position_K, predictions.token_K),
            rollout_logprobs_K=batch.rollout_logprobs_K,
            advantages_K=batch.advantages_K,
            reference_logprobs_K=self._reference_logprobs(predictions, objective, temperature),
        )
        loss_sum = weighted_sum(losses.loss_K, batch.weights_K, losses.kept_K)
        divisor = divisor_part(objective.aggregation, losses.kept_K, batch.num_counted_trajectories)
        entropy_K = entropies(logits_UV.detach())[predictions.position_K]
        figures.add(losses, entropy_K, batch.same_weights_K, float(loss_sum.detach()), divisor)
        return loss_sum, torch.tensor(divisor, dtype=torch.int), {}

    def _reference_logprobs(
        self, predictions: Predictions, objective: Objective, temperature: float
    ) -> torch.Tensor | None:
        if not isinstance(objective, PolicyObjective) or objective.kl_coef == 0:
            return None
        with self._reference_weights():
            return self._logprobs(predictions, temperature)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Within it the model computes with the weights that were loaded."""
        assert self._reference is not None
        current = [param.data for param in self._model.parameters()]
        try:
            for param, data in zip(self._model.parameters(), self._reference, strict=True):
                param.data = data
            yield
        finally:
            for param, data in zip(self._model.parameters(), current, strict=True):
                param.data = data

    @torch.no_grad()
    def _logprobs(self, predictions: Predictions, temperature: float) -> torch.Tensor:
        from services.trainer.megatron.model import logits_of

        logits_UV = scaled(logits_of(self._model.module, predictions.ids_N, predictions.packed), temperature)
        return token_logprobs(logits_UV, predictions.position_K, predictions.token_K)

    def score(
        self, ids_by_row: Sequence[NDArray[np.int32]], *, temperature: float = 1.0
    ) -> list[NDArray[np.float32]]:
        """Logprob of every token given those before it, per row, same length as the row; position 0 is 0.

        No gradient and no change of state. Logits are divided by `temperature`. Raises `ValueError` for a row
        that is empty, too long, or holds an id outside the vocabulary.
        """
        from services.trainer.megatron.batch import prediction_batches

        rows = [_context_row(ids_T) for ids_T in ids_by_row]
        for row in rows:
            row.check(self.vocab_size)
        scored = [np.zeros(ids_T.shape[0], dtype=np.float32) for ids_T in ids_by_row]
        wanted = [index for index, ids_T in enumerate(ids_by_row) if ids_T.shape[0] > 1]
        batches = prediction_batches(
            [ids_by_row[index] for index in wanted],
            [np.arange(1, ids_by_row[index].shape[0]) for index in wanted],
            self._microbatch_tokens,
        )
        for predictions in batches:
            logprobs_K = self._logprobs(predictions, temperature)
            parts = torch.split(logprobs_K, list(predictions.num_tokens_by_row))
            for row_index, part in zip(predictions.row_indices, parts, strict=True):
                scored[wanted[row_index]][1:] = part.numpy()
        return scored

    def export(self, folder: Path, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder: model.safetensors, config.json and the base folder's tokenizer files.

        `dtype` is "float32", "bfloat16", or None for the one the trainer computes in, so that an engine
        serves exactly the weights the trainer scores with. `folder` must be empty or absent (then it is
        made). No atomicity here: the caller renames.
        """
        from services.trainer.megatron.weights import to_huggingface

        if dtype is None:
            dtype = "bfloat16" if self._precision == "bf16" else "float32"
        masters = {name: tensor.detach() for name, tensor in master_weights(self._model.module).items()}
        hf_folder.write_folder(folder, self._base, to_huggingface(masters, self._shape), dtype)

    def save_state(self, folder: Path) -> None:
        """Write master weights, optimizer moments, random state and step to `folder` (made if absent).

        Raises `CheckpointError` where the folder cannot be written.
        """
        save_state(
            folder,
            model=self._model.module,
            optimizer=self._optimizer,
            step=self._step,
            precision=self._precision,
        )

    def load_state(self, folder: Path) -> None:
        """Continue from what `save_state` wrote for the same model and precision.

        Raises `CheckpointError` where the file is missing, unreadable or of another model.
        """
        self._step = load_state(
            folder, model=self._model.module, optimizer=self._optimizer, precision=self._precision
        )

    def close(self) -> None:
        """Free the model, the parallel state and the process group this backend started."""
        self._model = self._optimizer = self._reference = None
        if self._owns_group:
            parallel.shut_down()
            self._owns_group = False


def _context_row(ids_T: NDArray[np.int32]) -> TrainRow:
    return TrainRow(
        trajectory_id="scored",
        ids_T=ids_T,
        trained_T=np.zeros(ids_T.shape[0], dtype=np.bool_),
        rollout_logprobs_T=np.zeros(ids_T.shape[0], dtype=np.float32),
    )
