"""What the demo found: a table for people, `report.json` for programs. The same numbers in both."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from practicum.cli.recipe import DemoRecipe

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """Success on the held-out split at one weight version, with its 95 % Wilson interval."""

    success_rate: float
    wilson_low: float
    wilson_high: float
    num_tasks: int
    num_passed: int
    mean_turns: float
    tokens_generated: int
    infra_failed: int
    seconds: float
    weight_version: int

    @classmethod
    def from_evaluation(cls, answer: Json) -> "Heldout":
        """The figures of a finished evaluation."""
        return cls(
            success_rate=answer["success_rate"],
            wilson_low=answer["wilson_low"],
            wilson_high=answer["wilson_high"],
            num_tasks=answer["num_episodes"],
            num_passed=answer["num_passed"],
            mean_turns=answer["mean_turns"],
            tokens_generated=answer["tokens_generated"],
            infra_failed=answer["infra_failed"],
            seconds=answer["seconds"],
            weight_version=answer["weight_version"],
        )

    def __str__(self) -> str:
        return f"{self.success_rate:.2f}  [{self.wilson_low:.2f}, {self.wilson_high:.2f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The outcome of one demo."""

    model: str
    heldout_before: Heldout
    heldout_after: Heldout
    gain: float
    steps: int
    wall_s: float
    zero_variance_groups: list[int]
    reward_mean: list[float]
    tokens_generated: int
    tokens_trained: int
    mean_turns: float
    logprob_mismatch_max: float  # at equal weights: what engine and trainer compute differently
    logprob_drift_max: float  # over all trained tokens: what was learned since they were sampled
    engine_utilisation: float
    grades_per_second: float
    episodes_infra_failed: int
    step_seconds_mean: float
    wait_seconds_mean: float

    @classmethod
    def build(
        cls,
        *,
        recipe: DemoRecipe,
        run: Json,
        before: Heldout,
        after: Heldout,
        engines_before: Json,
        engines_after: Json,
        grades_per_second: float,
        wall_s: float,
    ) -> "DemoReport":
        """Gather the services' answers; utilisation is that of the time between the two engine readings."""
        steps: Sequence[Json] = run["steps"]
        busy_s = _slot_seconds(engines_after, "busy_slot_seconds") - _slot_seconds(
            engines_before, "busy_slot_seconds"
        )
        whole_s = _slot_seconds(engines_after) - _slot_seconds(engines_before)
        sampled = _tokens(engines_after) - _tokens(engines_before)
        return cls(
            model=recipe.model,
            heldout_before=before,
            heldout_after=after,
            gain=after.success_rate - before.success_rate,
            steps=len(steps),
            wall_s=round(wall_s, 1),
            zero_variance_groups=[step["zero_variance_groups"] for step in steps],
            reward_mean=[round(step["reward_mean"] or 0.0, 3) for step in steps],
            tokens_generated=before.tokens_generated + sampled + after.tokens_generated,
            tokens_trained=sum(step["tokens_trained"] for step in steps),
            mean_turns=_mean([step["mean_turns"] or 0.0 for step in steps]),
            logprob_mismatch_max=_max(steps, "logprob_mismatch_max", "publish_logprob_diff_max"),
            logprob_drift_max=_max(steps, "logprob_drift_max"),
            engine_utilisation=round(busy_s / max(whole_s, 1e-9), 3),
            grades_per_second=round(grades_per_second, 2),
            episodes_infra_failed=before.infra_failed
            + after.infra_failed
            + sum(step["infra_failed"] for step in steps),
            step_seconds_mean=_mean([step["seconds"] or 0.0 for step in steps]),
            wait_seconds_mean=_mean([step["wait_s"] or 0.0 for step in steps]),
        )

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        temporary.replace(path)

    def print(self, console: Console) -> None:
        """Print the table."""
        table = Table(title=f"From answering to doing: model {self.model}", show_header=False)
        table.add_column("figure")
        table.add_column("value", justify="right")
        before, after = self.heldout_before, self.heldout_after
        rows = [
            (f"held-out success before ({before.num_tasks} tasks, 95 % Wilson)", str(before)),
            (f"held-out success after ({after.num_tasks} tasks, 95 % Wilson)", f"[bold]{after}[/bold]"),
            ("gain", f"[bold]{self.gain:+.2f}[/bold]"),
            ("steps", str(self.steps)),
            ("wall time", f"{self.wall_s / 60:.1f} min"),
            ("zero-variance groups by step", " ".join(map(str, self.zero_variance_groups))),
            ("tokens generated", f"{self.tokens_generated:,}"),
            ("tokens trained", f"{self.tokens_trained:,}"),
            ("mean turns", f"{self.mean_turns:.2f}"),
            ("largest logprob mismatch, equal weights", f"{self.logprob_mismatch_max:.1e}"),
            ("largest logprob drift of stale tokens", f"{self.logprob_drift_max:.1f}"),
            ("engine utilisation", f"{self.engine_utilisation:.2f}"),
            ("grades per second", f"{self.grades_per_second:.1f}"),
            ("episodes lost to the platform", str(self.episodes_infra_failed)),
            (
                "seconds a step: training / waiting",
                f"{self.step_seconds_mean:.1f} / {self.wait_seconds_mean:.1f}",
            ),
        ]
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)


def _tokens(engines: Json) -> int:
    return sum(item["tokens_generated"] for item in engines["items"])


def _slot_seconds(engines: Json, key: str | None = None) -> float:
    items = engines["items"]
    return float(sum(item["slots"] * item["seconds"] if key is None else item[key] for item in items))


def _max(steps: Sequence[Json], *names: str) -> float:
    return max((step[name] or 0.0 for step in steps for name in names), default=0.0)


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 3) if values else 0.0
