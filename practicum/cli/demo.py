"""The demo: a small model goes from answering to doing, driven through the REST APIs alone.

Reads downwards: suite → (warm start) → evaluate → train → evaluate → report. Every number comes
from a service's answer; nothing is computed from what the demo itself decided.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.progress import Progress, TaskID

from examples.first_bugs import Demonstration, Draw, demonstrations, generate_suite
from practicum.cli.client import Json, PlatformClient, poll_until
from practicum.cli.process import ends_with_parent
from practicum.cli.recipe import DemoRecipe
from practicum.cli.report import DemoReport, Heldout
from practicum.errors import PracticumError

TERMINAL_STATES = frozenset({"completed", "stopped", "failed"})
DEMONSTRATIONS_PER_CALL = 512
TASKS_PER_SUITE = 8192
HELDOUT_OF_EVERY_DEMO = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoContext:
    """What every stage of the demo needs."""

    client: PlatformClient
    progress: Progress
    recipe: DemoRecipe
    reward_url: str


async def run_demo(context: DemoContext, model: Path) -> DemoReport:
    """Evaluate, train, evaluate; the report. `PracticumError` where a stage fails."""
    started_s = time.monotonic()
    await stop_leftover_runs(context)
    suite = await submit_suite(context)
    run_id = await start_run(context, model, suite)
    before = await evaluate(context, suite, "held-out success before")
    grades_before = await graded_so_far(context)
    engines_before = await context.client.rollout("GET", "/v1/engines")
    training_from_s = time.monotonic()
    await context.client.trainer("POST", f"/v1/runs/{run_id}:resume")
    run = await follow_run(context, run_id, "reinforcement learning")
    training_s = time.monotonic() - training_from_s
    num_graded = await graded_so_far(context) - grades_before
    engines_after = await context.client.rollout("GET", "/v1/engines")
    after = await evaluate(context, suite, "held-out success after")
    return DemoReport.build(
        recipe=context.recipe,
        run=run,
        before=before,
        after=after,
        engines_before=engines_before,
        engines_after=engines_after,
        grades_per_second=num_graded / training_s,
        wall_s=time.monotonic() - started_s,
    )


async def warm_start(context: DemoContext, base: Path, target: Path) -> None:
    """Train `base` on demonstrations played in real sandboxes, and put the result at `target`."""
    recipe = context.recipe
    await stop_leftover_runs(context)
    # The held-out tasks are drawn first, so no demonstration is of one of them.
    suite = generate_suite(
        recipe.seed, recipe.num_demonstrated_tasks, HELDOUT_OF_EVERY_DEMO, Draw.DEMONSTRATION
    )
    shown = demonstrations(suite, recipe.seed, recipe.share_right, recipe.demonstrations_per_task)
    created = await context.client.trainer("POST", "/v1/runs", recipe.sft_run(base, len(shown)))
    run_id = str(created["run_id"])
    following = asyncio.create_task(follow_run(context, run_id, "supervised warm start"))
    try:
        await play_demonstrations(context, run_id, suite, shown)
        await following
    finally:
        following.cancel()
    await run_example("examples.first_bugs.keep", str(await newest_checkpoint(context, run_id)), str(target))


async def play_demonstrations(
    context: DemoContext, run_id: str, suite: Json, shown: Sequence[Demonstration]
) -> None:
    """Play every demonstration for the run; the tasks go up once, in suites that a call may hold."""
    tasks = [task for task in suite["tasks"] if task["split"] == "train"]
    reference_of: dict[str, str] = {}
    for first in range(0, len(tasks), TASKS_PER_SUITE):
        part = tasks[first : first + TASKS_PER_SUITE]
        reference = await submit(context, _part(suite, first // TASKS_PER_SUITE, part))
        reference_of |= {task["name"]: reference for task in part}
    bar = context.progress.add_task("demonstrations played in sandboxes", total=len(shown))
    num_played = 0
    for reference, group in groupby(shown, key=lambda one: reference_of[one.task]):
        of_suite = list(group)
        for start in range(0, len(of_suite), DEMONSTRATIONS_PER_CALL):
            batch = [_scripted(one) for one in of_suite[start : start + DEMONSTRATIONS_PER_CALL]]
            body = {"run_id": run_id, "suite": reference, "demonstrations": batch}
            accepted = await context.client.rollout("POST", "/v1/demonstrations", body)
            await follow_demonstrations(context, accepted["demonstration_id"], bar, num_played)
            num_played += len(batch)


def _part(suite: Json, number: int, tasks: Sequence[Json]) -> Json:
    """Some tasks of a suite, as a suite of its own."""
    return {
        "name": f"{suite['name']}-shown-{number}",
        "version": suite["version"],
        "admission": "skip",  # every task of the generator is checked where it is made
        "tasks": tasks,
    }


def _scripted(shown: Demonstration) -> Json:
    """A demonstration as POST /v1/demonstrations takes it: one tool call a turn."""
    return {"task": shown.task, "turns": [{"text": "", "tool_calls": [call]} for call in shown.calls]}


async def follow_demonstrations(
    context: DemoContext, demonstration_id: str, bar: TaskID, num_before: int
) -> None:
    """Wait until a batch of demonstrations has been played; `PracticumError` where it failed."""
    answer = await poll_until(
        lambda: context.client.rollout("GET", f"/v1/demonstrations/{demonstration_id}"),
        lambda answer: answer["state"] in TERMINAL_STATES,
        lambda answer: context.progress.update(
            bar, completed=num_before + answer["num_done"] + answer["num_failed"]
        ),
    )
    if answer["state"] != "completed":
        raise PracticumError(f"the demonstrations {answer['state']}: {answer.get('error')}")


async def newest_checkpoint(context: DemoContext, run_id: str) -> Path:
    """The folder of the run's newest committed checkpoint."""
    page = await context.client.trainer("GET", "/v1/checkpoints", run_id=run_id)
    newest = max(page["items"], key=lambda item: item["weight_version"])
    return Path(newest["path"])


async def stop_leftover_runs(context: DemoContext) -> None:
    """End runs that an interrupted demo left behind: they would train before ours."""
    for state in ("pending", "running", "paused"):
        page = await context.client.trainer("GET", "/v1/runs", state=state, page_size=200)
        for run in page["items"]:
            if run["name"].startswith("demo-"):
                await context.client.trainer("POST", f"/v1/runs/{run['run_id']}:stop")


async def submit_suite(context: DemoContext) -> str:
    """Submit first-bugs and wait until every task is admitted; its reference, name@version."""
    suite = generate_suite(context.recipe.seed, context.recipe.num_train, context.recipe.num_heldout)
    return await submit(context, suite)


async def submit(context: DemoContext, suite: Json) -> str:
    """Submit one suite, or find it there already; its reference, name@version."""
    reference = f"{suite['name']}@{suite['version']}"
    view = await context.client.rollout("POST", "/v1/suites", suite)
    bar = context.progress.add_task("tasks admitted", total=len(suite["tasks"]))

    def num_in(answer: Json, *states: str) -> int:
        return sum(answer[split][state] for split in ("train", "heldout") for state in states)

    view = await poll_until(
        lambda: context.client.rollout("GET", f"/v1/suites/{view['suite_id']}"),
        lambda answer: answer["ready"],
        lambda answer: context.progress.update(bar, completed=num_in(answer, "admitted", "rejected")),
    )
    if rejected := num_in(view, "rejected"):
        raise PracticumError(f"{rejected} tasks of suite {reference} were not admitted")
    return reference


async def start_run(context: DemoContext, model: Path, suite: str) -> str:
    """Create the run, paused, and wait until the engines serve its base model."""
    created = await context.client.trainer("POST", "/v1/runs", context.recipe.rl_run(model, suite))
    run_id = str(created["run_id"])
    bar = context.progress.add_task("base model published", total=1)
    run = await poll_until(
        lambda: context.client.trainer("GET", f"/v1/runs/{run_id}"),
        lambda answer: answer["published_version"] is not None or answer["state"] in TERMINAL_STATES,
        lambda _: None,
    )
    if run["state"] in TERMINAL_STATES:
        raise PracticumError(f"the run {run['state']}: {run['error']}")
    context.progress.update(bar, completed=1)
    return run_id


async def evaluate(context: DemoContext, suite: str, label: str) -> Heldout:
    """Measure success on the held-out split with the weights that are served now."""
    accepted = await context.client.rollout("POST", "/v1/evaluations", context.recipe.evaluation(suite))
    bar = context.progress.add_task(label, total=context.recipe.num_heldout)
    path = f"/v1/evaluations/{accepted['evaluation_id']}"
    answer = await poll_until(
        lambda: context.client.rollout("GET", path),
        lambda answer: answer["state"] in TERMINAL_STATES,
        lambda answer: context.progress.update(bar, completed=answer["num_done"]),
    )
    if answer["state"] != "completed":
        raise PracticumError(f"the evaluation {answer['state']}: {answer.get('error')}")
    return Heldout.from_evaluation(answer)


async def follow_run(context: DemoContext, run_id: str, label: str) -> Json:
    """Show a run's steps until it has ended; `PracticumError` where its last version is not served."""
    bar: TaskID | None = None

    def show(answer: Json) -> None:
        nonlocal bar
        if bar is None:
            bar = context.progress.add_task(label, total=answer["num_steps"])
        text = label
        if answer["steps"]:
            name = "loss" if answer["stage"] == "sft" else "reward_mean"
            value = answer["steps"][-1][name]  # None = not finite, or nothing graded
            text += f" · {name.removesuffix('_mean')} {'none' if value is None else f'{value:.2f}'}"
        context.progress.update(bar, completed=answer["weight_version"], description=text)

    path = f"/v1/runs/{run_id}"
    answer = await poll_until(
        lambda: context.client.trainer("GET", path, last_steps=1),
        lambda answer: answer["state"] in TERMINAL_STATES,
        show,
    )
    if answer["state"] != "completed":
        raise PracticumError(f"the run {answer['state']}: {answer['error']}")
    # A run completes when its last version is served, or when that was tried for long enough.
    if answer["published_version"] != answer["weight_version"]:
        raise PracticumError(f"version {answer['weight_version']} is not served: {answer['publish_error']}")
    return await context.client.trainer("GET", path, last_steps=answer["num_steps"])


async def graded_so_far(context: DemoContext) -> float:
    """Grades that the reward service has given since it started."""
    samples = await context.client.metrics(context.reward_url)
    return sum(value for name, value in samples.items() if name.startswith("practicum_reward_grades_total"))


async def make_model_folder(module: str, folder: Path) -> None:
    """Make a model folder by an example's maker, unless it is there."""
    if not (folder / "config.json").exists():
        await run_example(module, str(folder))


async def run_example(module: str, *arguments: str) -> None:
    """Run an example in a process of its own, since this one never imports torch."""
    command = ends_with_parent([sys.executable, "-m", module, *arguments])
    maker = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, errors = await maker.communicate()
    except asyncio.CancelledError:
        maker.kill()
        await maker.wait()
        raise
    if maker.returncode:
        raise PracticumError(f"{module} failed:\n{errors.decode(errors='replace')[-2000:]}")
