"""The learning-rate schedule and the bounds of its options."""

import pytest

from services.trainer.megatron.optimizer import OptimizerConfig, Schedule, learning_rate_at


def rates(schedule: Schedule, **options: float) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, num_steps=6, schedule=schedule, **options)  # type: ignore[arg-type]
    return [learning_rate_at(step, config) for step in range(8)]


def test_constant_when_warmed_up_then_stays() -> None:
    assert rates(Schedule.CONSTANT) == [0.5, 1, 1, 1, 1, 1, 1, 1]


def test_linear_when_past_the_end_then_stays_at_the_floor() -> None:
    assert rates(Schedule.LINEAR, min_lr_ratio=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_when_half_way_then_half() -> None:
    assert rates(Schedule.COSINE) == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"clip_grad": -1.0}, "clip_grad"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio"),
        ({"num_steps": 0}, "num_steps"),
    ],
)
def test_config_when_an_option_is_out_of_range_then_refused_by_name(
    options: dict[str, object], field: str
) -> None:
    with pytest.raises(ValueError, match=f"optimizer.{field}"):
        OptimizerConfig(**options)  # type: ignore[arg-type]
