"""The step: the same update as plain transformers + AdamW, for any split, and resumable bit for bit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from practicum.errors import CheckpointError
from services.trainer.algorithms.objective import (
    Aggregation,
    Objective,
    OffPolicy,
    OldPolicy,
    PolicyObjective,
    SftObjective,
)
from services.trainer.megatron.backend import MegatronBackend, OptimizerConfig, TrainRow
from services.trainer.megatron.optimizer import Schedule
from tests.fixtures.megatron import FAMILIES, model_folder, random_rows, train_row

Load = Callable[..., MegatronBackend]

# A large eps makes the update follow the gradient's size, so that a wrong scale shows in the weights.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-2, clip_grad=0.5, warmup_steps=2)


@pytest.fixture
def load() -> Iterator[Load]:
    backends: list[MegatronBackend] = []

    def load_backend(folder: Path, **options: object) -> MegatronBackend:
        backends.append(MegatronBackend.load(folder, **{"optimizer": OPTIMIZER, **options}))  # type: ignore[arg-type]
        return backends[-1]

    yield load_backend
    for backend in reversed(backends):
        backend.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "base")


def weights_of(backend: MegatronBackend, folder: Path) -> dict[str, torch.Tensor]:
    backend.export(folder, dtype="float32")
    return load_file(folder / "model.safetensors")


def assert_same_weights(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, atol: float = 0.0
) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=atol, rtol=0, msg=name)


def plain_steps(
    folder: Path, rows: Sequence[TrainRow], num_steps: int, temperature: float
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """GRPO with transformers, one row at a time, and torch's AdamW; weights and gradient norms."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0
    )
    num_trained = sum(int(row.trained_T.sum()) for row in rows)
    norms = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for row in rows:
            ids = torch.from_numpy(row.ids_T.astype(np.int64))
            trained = torch.from_numpy(row.trained_T)[1:]
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, -1)
            ratio = (
                logprobs.gather(-1, ids[1:, None])[:, 0] - torch.from_numpy(row.rollout_logprobs_T)[1:]
            ).exp()
            loss = -torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.28) * row.advantage)
            (loss[trained].sum() / num_trained).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)))
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.warmup_steps)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, norms


@pytest.mark.parametrize("family", FAMILIES)
def test_train_for_each_family_then_equals_plain_transformers(
    family: str, tmp_path: Path, load: Load
) -> None:
    folder = model_folder(tmp_path / "base", family)
    rows = random_rows()
    backend = load(folder, microbatch_tokens=128)
    results = [backend.train(rows, PolicyObjective(), temperature=0.8) for _ in range(3)]
    expected, norms = plain_steps(folder, rows, 3, temperature=0.8)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-4)
    assert [result.learning_rate for result in results] == [0.005, 0.01, 0.01]
    assert results[0].num_microbatches > 1
    actual = weights_of(backend, tmp_path / "out")
    expected = {name: tensor for name, tensor in expected.items() if name in actual}
    assert_same_weights(actual, expected, atol=2e-5)


OBJECTIVES: dict[str, Objective] = {
    "token_mean": PolicyObjective(),
    "trajectory_mean": PolicyObjective(aggregation=Aggregation.TRAJECTORY_MEAN),
    "constant": PolicyObjective(aggregation=Aggregation.CONSTANT, constant_tokens=50),
    "masked": PolicyObjective(off_policy=OffPolicy.MASK, off_policy_cap=1.5),
    "masked_trajectory_mean": PolicyObjective(
        off_policy=OffPolicy.MASK, off_policy_cap=1.5, aggregation=Aggregation.TRAJECTORY_MEAN
    ),
    "truncated": PolicyObjective(off_policy=OffPolicy.TRUNCATE, old_policy=OldPolicy.RECOMPUTED),
    "kl": PolicyObjective(kl_coef=0.1),
    "sft": SftObjective(),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_train_for_any_split_then_the_same_update(
    objective: Objective, folder: Path, tmp_path: Path, load: Load
) -> None:
    rows = random_rows(8)
    outcomes = []
    for index, microbatch_tokens in enumerate((10_000, 70)):
        backend = load(folder, microbatch_tokens=microbatch_tokens, keep_reference=True)
        backend.train(rows, objective)  # so that the reference differs from the policy
        result = backend.train(rows, objective)
        outcomes.append((result, weights_of(backend, tmp_path / str(index))))
    (whole, whole_weights), (split, split_weights) = outcomes
    assert whole.num_microbatches == 1
    assert split.num_microbatches > 3
    assert whole.grad_norm > 0
    for name in ("loss", "grad_norm", "entropy", "ratio_mean", "drift_kl", "reference_kl"):
        assert getattr(split, name) == pytest.approx(getattr(whole, name), rel=1e-4, abs=1e-6), name
    assert split.num_tokens_trained == whole.num_tokens_trained
    assert split.num_tokens_rejected == whole.num_tokens_rejected
    assert_same_weights(whole_weights, split_weights, atol=2e-5)


def test_train_when_tokens_are_rejected_then_they_leave_the_denominator(folder: Path, load: Load) -> None:
    rows = random_rows(4)
    scored = load(folder).score([row.ids_T for row in rows])
    exact = [
        replace(row, rollout_logprobs_T=np.where(row.trained_T, logprobs_T, 0).astype(np.float32))
        for row, logprobs_T in zip(rows, scored, strict=True)
    ]
    far = [replace(row, rollout_logprobs_T=row.rollout_logprobs_T - 5) for row in exact[2:]]
    objective = PolicyObjective(off_policy=OffPolicy.MASK, old_policy=OldPolicy.RECOMPUTED)
    both = load(folder).train([*exact[:2], *far], objective)
    alone = load(folder).train(exact[:2], objective)
    assert both.num_tokens_rejected == sum(int(row.trained_T.sum()) for row in far)
    assert both.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
    assert both.logprob_drift_max == pytest.approx(5, abs=1e-3)
    assert alone.logprob_drift_max < 1e-4
    assert alone.drift_kl < 1e-8


def test_train_when_some_tokens_are_of_other_weights_then_mismatch_leaves_them_out(
    folder: Path, load: Load
) -> None:
    rows = random_rows(4)
    scored = load(folder).score([row.ids_T for row in rows])
    fresh = [
        replace(
            row,
            rollout_logprobs_T=np.where(row.trained_T, logprobs_T, 0).astype(np.float32),
            same_weights_T=row.trained_T,
        )
        for row, logprobs_T in zip(rows, scored, strict=True)
    ]
    # In one row a single token was sampled by older weights, under which it was far less likely.
    first = int(np.flatnonzero(fresh[0].trained_T)[0])
    is_old_T = np.arange(fresh[0].ids_T.shape[0]) == first
    mixed = replace(
        fresh[0],
        rollout_logprobs_T=np.where(is_old_T, fresh[0].rollout_logprobs_T - 5, fresh[0].rollout_logprobs_T),
        same_weights_T=fresh[0].trained_T & ~is_old_T,
    )
    result = load(folder).train([mixed, *fresh[1:]], PolicyObjective())
    assert result.logprob_drift_max == pytest.approx(5, abs=1e-3)
    assert result.drift_kl > 1e-3
    assert result.logprob_mismatch_max is not None
    assert result.mismatch_kl is not None
    assert result.logprob_mismatch_max < 1e-4
    assert result.mismatch_kl < 1e-8
    stale = load(folder).train([replace(row, same_weights_T=None) for row in fresh], PolicyObjective())
    assert (stale.logprob_mismatch_max, stale.mismatch_kl) == (None, None)


def test_trajectory_mean_when_tokens_are_rejected_then_each_mean_divides_by_the_kept(
    folder: Path, load: Load
) -> None:
    objective = PolicyObjective(
        off_policy=OffPolicy.MASK, old_policy=OldPolicy.RECOMPUTED, aggregation=Aggregation.TRAJECTORY_MEAN
    )
    rows = [row for row in random_rows(4, shared=0) if row.trained_T.any()]
    scored = load(folder).score([row.ids_T for row in rows])
    kept, rejecting = [], []
    for index, (row, logprobs_T) in enumerate(zip(rows, scored, strict=True)):
        exact_T = np.where(row.trained_T, logprobs_T, 0).astype(np.float32)
        rejected_T = row.trained_T & (np.arange(row.ids_T.size) % 3 == index % 3)
        kept.append(replace(row, trained_T=row.trained_T & ~rejected_T, rollout_logprobs_T=exact_T))
        far_T = (exact_T - 9 * rejected_T).astype(np.float32)
        rejecting.append(replace(row, rollout_logprobs_T=far_T))
    expected = load(folder).train(kept, objective)
    result = load(folder, microbatch_tokens=50).train(rejecting, objective)
    assert result.num_tokens_rejected > 0
    assert result.num_tokens_trained == expected.num_tokens_trained
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.parametrize(("advantage", "sign"), [(1.0, 1), (-1.0, -1), (0.0, 0)])
def test_C27_train_moves_the_sampled_token_the_way_of_its_advantage(
    advantage: float, sign: int, folder: Path, load: Load
) -> None:
    backend = load(folder)
    ids = [5, 9, 11, 3]
    (before,) = backend.score([np.array(ids, dtype=np.int32)])
    row = train_row(ids, [False, False, False, True], advantage=advantage, rollout=float(before[3]))
    result = backend.train([row], PolicyObjective())
    (after,) = backend.score([row.ids_T])
    change = float(after[3] - before[3])
    assert (change > 1e-6) - (change < -1e-6) == sign
    assert result.ratio_mean == pytest.approx(1, abs=1e-5)
    assert result.loss == pytest.approx(-advantage, abs=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_load_state_then_continues_bit_for_bit(
    precision: str, folder: Path, tmp_path: Path, load: Load
) -> None:
    rows = random_rows()
    config = replace(OPTIMIZER, schedule=Schedule.COSINE, num_steps=6)
    straight = load(folder, precision=precision, optimizer=config)
    for _ in range(2):
        straight.train(rows, PolicyObjective())
    torch.rand(5)  # so that the random state is not the one a fresh load starts from
    straight.save_state(tmp_path / "state")
    drawn = torch.rand(3)
    resumed = load(folder, precision=precision, optimizer=config)
    resumed.load_state(tmp_path / "state")
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.step == 2
    assert resumed.learning_rate == straight.learning_rate
    for _ in range(2):
        one, other = (backend.train(rows, PolicyObjective()) for backend in (straight, resumed))
        assert replace(one, seconds=0) == replace(other, seconds=0)
    assert_same_weights(weights_of(straight, tmp_path / "a"), weights_of(resumed, tmp_path / "b"))


def test_bf16_when_trained_then_close_to_fp32_and_masters_hold_small_updates(
    folder: Path, tmp_path: Path, load: Load
) -> None:
    # Two hundred times below the rounding of bf16 at these weights: only fp32 masters can add it up.
    config = replace(OPTIMIZER, lr=1e-5, warmup_steps=0, eps=1e-8)
    rows = random_rows()
    half, full = load(folder, precision="bf16", optimizer=config), load(folder, optimizer=config)
    results = [backend.train(rows, PolicyObjective()) for backend in (half, full)]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=0.1)
    name = "model.embed_tokens.weight"
    start = load_file(folder / "model.safetensors")[name]
    moved = weights_of(half, tmp_path / "half")[name] - start
    assert 0 < moved.abs().max().item() <= 1.1e-5


def test_load_state_when_damaged_or_of_another_model_then_checkpoint_error(
    folder: Path, tmp_path: Path, load: Load
) -> None:
    backend = load(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        backend.load_state(tmp_path / "absent")
    load(model_folder(tmp_path / "other", "qwen3")).save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="another model"):
        backend.load_state(tmp_path / "state")
    path = tmp_path / "state" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        backend.load_state(tmp_path / "state")


def test_train_when_gradient_is_not_finite_then_nothing_moves(
    folder: Path, tmp_path: Path, load: Load
) -> None:
    backend = load(folder)
    rows = random_rows()
    result = backend.train([replace(row, advantage=3e38) for row in rows], PolicyObjective(clip_high=1e6))
    assert (result.updated, result.skipped_reason, result.step) == (False, "non_finite_gradient", 0)
    assert_same_weights(weights_of(backend, tmp_path / "out"), load_file(folder / "model.safetensors"))
    assert backend.train(rows, PolicyObjective()).updated


@pytest.mark.parametrize("rejected", [False, True])
def test_train_when_no_token_is_left_then_skipped_and_reported(
    rejected: bool, folder: Path, tmp_path: Path, load: Load
) -> None:
    backend = load(folder)
    row = train_row([1, 2, 3], [False, rejected, rejected], rollout=-500.0)
    result = backend.train([row], PolicyObjective(off_policy=OffPolicy.MASK))
    assert (result.updated, result.skipped_reason, result.step) == (False, "no_trained_tokens", 0)
    assert result.num_tokens_rejected == (2 if rejected else 0)
    assert_same_weights(weights_of(backend, tmp_path / "out"), load_file(folder / "model.safetensors"))


GOOD = train_row([1, 2, 3], [False, True, True])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (replace(GOOD, ids_T=np.array([1, 64, 3], dtype=np.int32)), "outside the vocabulary of 64"),
        (replace(GOOD, ids_T=np.array([1, -1, 3], dtype=np.int32)), "outside the vocabulary"),
        (replace(GOOD, trained_T=np.array([True, True, True])), "first token"),
        (replace(GOOD, trained_T=np.array([False, True])), "different lengths"),
        (replace(GOOD, advantage=float("nan")), "not finite"),
        (replace(GOOD, rollout_logprobs_T=np.full(3, -np.inf, dtype=np.float32)), "not finite"),
        (train_row(range(51), [False] * 50 + [True]), "51 tokens, more than microbatch_tokens 50"),
    ],
)
def test_train_when_a_row_is_malformed_then_value_error_and_nothing_moves(
    row: TrainRow, message: str, folder: Path, load: Load
) -> None:
    backend = load(folder, microbatch_tokens=50)
    with pytest.raises(ValueError, match=message):
        backend.train([GOOD, row], PolicyObjective())
    assert backend.step == 0


def test_train_when_kl_without_reference_then_value_error(folder: Path, load: Load) -> None:
    with pytest.raises(ValueError, match="keep_reference"):
        load(folder).train([GOOD], PolicyObjective(kl_coef=0.1))


def test_train_when_kl_pulls_then_policy_returns_to_the_reference(folder: Path, load: Load) -> None:
    backend = load(folder, keep_reference=True, optimizer=replace(OPTIMIZER, warmup_steps=0))
    rows = random_rows()
    first = backend.train(rows, PolicyObjective(kl_coef=1.0))
    assert first.reference_kl == pytest.approx(0, abs=1e-9)
    away = backend.train([replace(row, advantage=0.0) for row in rows], PolicyObjective(kl_coef=1.0))
    back = backend.train([replace(row, advantage=0.0) for row in rows], PolicyObjective(kl_coef=1.0))
    assert away.reference_kl > 0
    assert 0 < back.reference_kl < away.reference_kl


def test_train_when_rows_share_a_prompt_then_it_is_computed_once(folder: Path, load: Load) -> None:
    rows = random_rows(8, shared=60)
    result = load(folder).train(rows, PolicyObjective())
    assert result.num_tokens == sum(row.ids_T.size for row in rows)
    assert result.num_tokens_computed <= result.num_tokens - 6 * 60
