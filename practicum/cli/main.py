"""The `practicum` command. Everything it does to a platform goes through REST.

Tokens are the exception: who may call is written in a file of the operator's, never over the network.
"""

import asyncio
import json
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from practicum.cli import demo as demo_flow
from practicum.cli import tokens
from practicum.cli.client import connect_platform
from practicum.cli.recipe import SMOLLM2, TINY, TINY_FULL, DemoRecipe
from practicum.cli.report import DemoReport
from practicum.cli.stack import StackOptions, read_stack, running_stack
from practicum.errors import PracticumError, first_error
from practicum.telemetry.logs import configure_logs

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train models to do things.")
app.add_typer(tokens.app, name="token")
console = Console()
errors = Console(stderr=True)

REPOSITORY = Path(__file__).resolve().parents[2]
TINY_FOLDER = REPOSITORY / "examples" / "first_bugs" / "tiny"

DataDir = Annotated[Path, typer.Option(help="Where state, logs and checkpoints go.")]


class DemoModel(StrEnum):
    """The models that the demo knows."""

    TINY = "tiny"
    SMOLLM2 = "smollm2"


@app.command()
def up(
    model: Annotated[Path, typer.Option(help="The Hugging Face folder to serve.")] = TINY_FOLDER,
    data_dir: DataDir = Path("var/local"),
    engine_url: Annotated[
        str | None, typer.Option(help="An SGLang server that serves this model; default: a CPU engine.")
    ] = None,
) -> None:
    """Start the local stack and keep it running until Ctrl-C."""
    _main(_up(StackOptions(data_dir=data_dir, model=model, engine_url=engine_url)))


@app.command()
def demo(
    model: Annotated[DemoModel, typer.Option(help="The model to train.")] = DemoModel.TINY,
    full: Annotated[
        bool, typer.Option("--full", help="Go on to the real bar: 200 tasks, 15 minutes.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Make the tiny model and its warm start again first.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of reinforcement learning.")] = None,
    heldout: Annotated[int | None, typer.Option(help="Held-out tasks to measure on.")] = None,
    train: Annotated[int | None, typer.Option(help="Tasks to train on.")] = None,
    data_dir: DataDir = Path("var/local"),
    engine_url: Annotated[
        str | None, typer.Option(help="An SGLang server that serves the model; default: a CPU engine.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Where the report goes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run the main job end to end: evaluate, train, evaluate, report."""
    recipe = SMOLLM2 if model is DemoModel.SMOLLM2 else (TINY_FULL if full else TINY)
    recipe = replace(
        recipe,
        num_steps=recipe.num_steps if steps is None else steps,
        num_heldout=recipe.num_heldout if heldout is None else heldout,
        num_train=recipe.num_train if train is None else train,
    )
    name = (
        "report-full.json" if full else ("report.json" if model is DemoModel.TINY else f"report-{model}.json")
    )
    path = report or Path("var/demo") / name
    made = _main(_demo(recipe, data_dir, from_scratch, engine_url))
    made.write(path)
    if as_json:
        console.print_json(path.read_text())
    else:
        made.print(console)
        console.print(f"report: {path}")


@app.command()
def status(
    data_dir: DataDir = Path("var/local"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which local stack runs and where."""
    addresses = read_stack(data_dir)
    if addresses is None:
        errors.print(f"no stack runs on {data_dir}; start one with: practicum up --data-dir {data_dir}")
        raise typer.Exit(1)
    if as_json:
        console.print_json(json.dumps(asdict(addresses)))
        return
    table = Table("part", "address", "pid")
    for name in ("rollout", "reward", "trainer", "engine"):
        table.add_row(name, getattr(addresses, f"{name}_url"), str(addresses.pids.get(name, "")))
    console.print(table)


def main() -> None:
    """The console script."""
    configure_logs("cli", "warning")
    app()


def _main(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; Ctrl-C and SIGTERM cancel the work, which ends what it started."""

    async def cancellable() -> Any:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        errors.print("stopped")
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        first = first_error(group)
        if not isinstance(first, PracticumError):
            raise
        errors.print(f"[red]error:[/red] {first}", highlight=False)
        raise typer.Exit(1) from None
    except (PracticumError, FileNotFoundError) as error:
        errors.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None


async def _up(options: StackOptions) -> None:
    async with running_stack(options, lambda text: errors.print(text)) as addresses:
        errors.print(f"rollout  {addresses.rollout_url}/docs")
        errors.print(f"reward   {addresses.reward_url}/docs")
        errors.print(f"trainer  {addresses.trainer_url}/docs")
        errors.print(f"token in {options.data_dir}/stack.json; Ctrl-C stops everything")
        await asyncio.Event().wait()


async def _demo(recipe: DemoRecipe, data_dir: Path, from_scratch: bool, engine_url: str | None) -> DemoReport:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    model = await _model_folder(recipe, data_dir, from_scratch)
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=errors))
        addresses = read_stack(data_dir)
        if addresses is None:
            options = StackOptions(data_dir=data_dir, model=model, engine_url=engine_url)
            starting = progress.add_task("local stack", total=1)
            addresses = await stack.enter_async_context(
                running_stack(options, lambda text: progress.update(starting, description=text))
            )
            progress.update(starting, completed=1, description="local stack is up")
        elif engine_url or addresses.model != str(model.resolve()):
            raise PracticumError(
                f"the stack on {data_dir} serves {addresses.model}; stop it or give another --data-dir"
            )
        client = await stack.enter_async_context(connect_platform(addresses))
        context = demo_flow.DemoContext(
            client=client, progress=progress, recipe=recipe, reward_url=addresses.reward_url
        )
        if from_scratch:
            await demo_flow.warm_start(context, model, TINY_FOLDER)
            model = TINY_FOLDER
        return await demo_flow.run_demo(context, model)


async def _model_folder(recipe: DemoRecipe, data_dir: Path, from_scratch: bool) -> Path:
    if recipe.model == DemoModel.SMOLLM2:
        folder = data_dir / "models" / "smollm2"
        await demo_flow.make_model_folder("examples.smollm2", folder)
        return folder
    if from_scratch:
        folder = data_dir / "models" / "tiny-untrained"
        await demo_flow.make_model_folder("examples.first_bugs.make_tiny", folder)
        return folder
    return TINY_FOLDER
