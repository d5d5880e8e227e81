"""Which tokens a step trains, with which advantage, and what it says about them."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from practicum.trajectory import MaskReason, Outcome
from services.trainer.intake.groups import Group
from services.trainer.report import step_metrics
from services.trainer.spec import RunSpec, Stage
from services.trainer.step import StepOutcome, expire_row, run_step
from tests.fixtures.trainer import PROMPT, ScriptedBackend, complete_group, rl_spec, row


def take_step(
    *groups: Group, spec: RunSpec | None = None, version: int = 0
) -> tuple[ScriptedBackend, StepOutcome]:
    backend = ScriptedBackend()
    return backend, run_step(backend, groups, spec or rl_spec(), weight_version=version)


def test_run_step_when_rewards_differ_gives_each_row_its_groups_advantage() -> None:
    backend, outcome = take_step(complete_group([0.0, 1.0, 1.0]))
    assert [row.advantage for row in backend.rows] == pytest.approx(
        [-math.sqrt(2), 0.70711, 0.70711], abs=1e-4
    )
    assert outcome.reward_mean == pytest.approx(2 / 3)
    assert outcome.num_zero_variance_groups == 0


def test_run_step_when_a_group_says_nothing_leaves_its_rows_out() -> None:
    backend, outcome = take_step(complete_group([1.0, 1.0]), complete_group([0.0, 1.0], group=1))
    assert {row.trajectory_id for row in backend.rows} == {"ep_run_1_1_0-1", "ep_run_1_1_1-1"}
    assert (outcome.num_groups, outcome.num_zero_variance_groups, outcome.num_trajectories) == (2, 1, 4)
    assert outcome.reward_mean == pytest.approx(0.75)


def test_run_step_when_the_platform_failed_an_episode_leaves_it_out_of_the_baseline() -> None:
    backend, outcome = take_step(complete_group([0.0, None, 1.0]))
    assert [row.advantage for row in backend.rows] == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert (outcome.num_trajectories, outcome.num_infra_failed) == (2, 1)
    assert outcome.reward_mean == pytest.approx(0.5)


def test_run_step_when_every_group_says_nothing_trains_no_row() -> None:
    backend, outcome = take_step(complete_group([0.0, 0.0]), complete_group([1.0, 1.0], group=1))
    assert backend.rows == []
    assert outcome.num_zero_variance_groups == 2
    assert not outcome.result.updated


def test_run_step_when_no_trajectory_is_usable_counts_no_zero_variance_group() -> None:
    _, outcome = take_step(complete_group([None, None]), complete_group([0.0, 1.0], group=1))
    assert (outcome.num_zero_variance_groups, outcome.num_infra_failed) == (0, 2)


def test_run_step_when_trajectories_only_fill_their_place_counts_each_by_why() -> None:
    group = complete_group([0.0, 1.0, None, 1.0, 1.0])
    arrivals = list(group.arrivals)
    cancelled = replace(arrivals[3].trajectory, outcome=Outcome.CANCELLED, grade=None)
    arrivals[3] = replace(arrivals[3], trajectory=cancelled, usable=False)
    arrivals[4] = replace(arrivals[4], usable=False, quarantined=True)
    _, outcome = take_step(replace(group, arrivals=tuple(arrivals)))
    assert outcome.num_trajectories == 2
    assert (outcome.num_infra_failed, outcome.num_cancelled, outcome.num_quarantined) == (1, 1, 1)
    metrics = step_metrics(outcome, wait_s=0.0, commit_s=0.0)
    assert (metrics["infra_failed"], metrics["cancelled"], metrics["quarantined"]) == (1, 1, 1)


def test_run_step_when_versions_differ_marks_the_tokens_of_the_trained_weights() -> None:
    backend, _ = take_step(complete_group([0.0, 1.0], rows=(row(versions=(3, 4, 4)),)), version=4)
    for trained in backend.rows:
        assert trained.same_weights_T is not None
        assert trained.same_weights_T.tolist() == [False] * (PROMPT + 1) + [True, True]


def test_run_step_when_tokens_are_too_old_masks_only_those() -> None:
    member_rows = (row(versions=(3, 5, 5)),)
    backend, outcome = take_step(complete_group([0.0, 1.0], rows=member_rows), version=6)
    for trained in backend.rows:
        assert trained.trained_T.tolist() == [False] * (PROMPT + 1) + [True, True]
    assert outcome.tokens_by_reason["expired"] == 2
    assert outcome.tokens_by_reason["model"] == 4
    assert outcome.staleness is not None
    assert (outcome.staleness.min, outcome.staleness.max) == (1, 3)
    assert outcome.staleness.mean == pytest.approx((3 + 1 + 1) / 3)


def test_expire_row_when_done_keeps_the_rows_invariants() -> None:
    expired = expire_row(row(versions=(1, 4, 2, 4), tool_tokens=2), 3)
    expired.check()
    reasons = [(span.start, span.end, span.reason) for span in expired.mask_spans]
    assert reasons == [
        (0, 3, MaskReason.PROMPT),
        (3, 4, MaskReason.EXPIRED),
        (4, 5, MaskReason.MODEL),
        (5, 6, MaskReason.EXPIRED),
        (6, 7, MaskReason.MODEL),
        (7, 9, MaskReason.TOOL),
    ]


def test_run_step_when_a_trajectory_has_several_rows_trains_each_with_its_id() -> None:
    backend, outcome = take_step(complete_group([0.0, 1.0], rows=(row(), row(first_id=9, tool_tokens=3))))
    assert [row.trajectory_id for row in backend.rows] == ["ep_run_1_0_0-1"] * 2 + ["ep_run_1_0_1-1"] * 2
    assert outcome.tokens_by_reason == {"prompt": 12, "tool": 6, "model": 16, "expired": 0, "injected": 0}
    assert outcome.mean_sampled_tokens == 8
    assert outcome.mean_turns == 2


def test_run_step_when_the_stage_is_sft_trains_all_whatever_their_reward() -> None:
    spec = rl_spec(stage=Stage.SFT, rollout=None, trajectories_per_step=2)
    groups = [complete_group([1.0], group=0), complete_group([1.0], group=1)]
    backend, outcome = take_step(*groups, spec=spec, version=9)
    assert len(backend.rows) == 2
    assert all(row.trained_T.sum() == 4 for row in backend.rows)  # old versions do not expire
    assert outcome.num_zero_variance_groups == 0


def test_step_metrics_when_a_figure_is_not_finite_are_json_with_null() -> None:
    _, outcome = take_step(complete_group([0.0, 1.0]))
    metrics: dict[str, Any] = step_metrics(outcome, wait_s=1.5, commit_s=np.inf)
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["grad_norm"] is None
    assert metrics["commit_s"] is None
    assert (metrics["loss"], metrics["wait_s"], metrics["tokens_trained"]) == (0.5, 1.5, 8)
