"""Generates the suite: draws instances of the kinds, injects one bug each, and writes their tests.

Owns the task format of `POST /v1/suites` for first-bugs. Never touches disk. Invariants, checked here: every
task fails its visible and its hidden tests, the module without the bug passes both, and no module (without
its bug) occurs in both splits. The same seed gives the same suite, and a longer suite of that seed begins
alike.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from random import Random
from typing import Any

from examples.first_bugs import kinds_dates, kinds_lists, kinds_numbers, kinds_text
from examples.first_bugs.kinds import NAMES, Arguments, Bug, Kind, fill, placeholders
from examples.first_bugs.verify import call, passes

KINDS: tuple[Kind, ...] = kinds_dates.KINDS + kinds_numbers.KINDS + kinds_lists.KINDS + kinds_text.KINDS

SUITE = "first-bugs"
VERSION = "2"
TOOLS = ("read_file", "edit_file", "run_tests", "finish")
GRADER_TIMEOUT_S = 10
HIDDEN_TESTS = 6
_CANDIDATES = 40  # inputs drawn for an instance, from which the tests are chosen
_ATTEMPTS = 200  # draws before a kind is called exhausted


class Draw(StrEnum):
    """What the train split is for. The draws of a seed share its held-out split and nothing on purpose.

    A policy that practised on the tasks it was shown would remember their fixes instead of finding them.
    """

    PRACTICE = "practice"
    DEMONSTRATION = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One drawn function with its bug and its tests."""

    kind: str
    module: str  # file stem
    bug: str
    fixed: str  # the module as it should be
    broken: str  # the module as the task gives it
    right: str  # fragment of `fixed` ...
    buggy: str  # ... that stands as this in `broken`, exactly once
    visible_tests: str
    hidden_tests: str


def instantiate(kind: Kind, bug: Bug, rng: Random) -> Instance | None:
    """One instance, or None where the drawn names or inputs do not make a sound task."""
    values: dict[str, int | str] = {"f": rng.choice(kind.functions), **kind.constants(rng)}
    free = [name for name in placeholders(kind.source) if name not in values]
    values |= dict(zip(free, rng.sample(NAMES, len(free)), strict=True))
    fixed = fill(kind.source, values)
    right, buggy = fill(bug.right, values), fill(bug.buggy, values)
    broken = fixed.replace(right, buggy)
    if right == buggy or fixed.count(right) != 1 or broken.count(buggy) != 1:
        return None
    function = str(values["f"])
    candidates = [kind.inputs(rng, values) for _ in range(_CANDIDATES)]
    cases = {repr(arguments): arguments for arguments in candidates}.values()
    revealing = [c for c in cases if call(broken, function, c) != call(fixed, function, c)]
    others = [c for c in cases if c not in revealing]
    if not revealing:
        return None
    # a bug at a boundary may show on one input alone: then both files have it
    hidden = [*(revealing[1 : HIDDEN_TESTS // 2 + 1] or revealing), *others[1:]][:HIDDEN_TESTS]
    visible = [revealing[0], *others[:1]]
    return Instance(
        kind=kind.name,
        module=kind.module,
        bug=bug.name,
        fixed=fixed,
        broken=broken,
        right=right,
        buggy=buggy,
        visible_tests=_tests(kind.module, function, fixed, visible),
        hidden_tests=_tests(kind.module, function, fixed, hidden),
    )


def _tests(module: str, function: str, fixed: str, cases: list[Arguments]) -> str:
    blocks = [f"from {module} import {function}\n"]
    for number, arguments in enumerate(cases, start=1):
        shown = ", ".join(repr(argument) for argument in arguments)
        expected = call(fixed, function, arguments)
        operator = "is" if isinstance(expected, bool) else "=="
        blocks.append(f"def test_{number}():\n    assert {function}({shown}) {operator} {expected!r}\n")
    return "\n\n".join(blocks)


def _sound(instance: Instance) -> bool:
    tests = (instance.visible_tests, instance.hidden_tests)
    return all(passes(instance.fixed, t) for t in tests) and not any(
        passes(instance.broken, t) for t in tests
    )


def _draw(rng: Random, kind: Kind, used: set[str]) -> Instance:
    for _ in range(_ATTEMPTS):
        instance = instantiate(kind, rng.choice(kind.bugs), rng)
        if instance is not None and normalised(instance.fixed) not in used and _sound(instance):
            return instance
    raise ValueError(f"kind {kind.name}: no new instance in {_ATTEMPTS} draws; ask for fewer tasks")


def normalised(text: str) -> str:
    """A module's text without differences of spacing."""
    return " ".join(text.split())


@lru_cache(maxsize=4)
def draw_instances(
    seed: int, num_train: int, num_heldout: int, draw: Draw = Draw.PRACTICE
) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
    """The train and held-out instances of a seed; kinds take turns, and no module occurs twice."""
    used: set[str] = set()
    splits: list[tuple[Instance, ...]] = []
    # held-out first: it stays the same whatever the train split is
    for name, count in (("heldout", num_heldout), (draw.value, num_train)):
        rng = Random(f"{seed}/{name}")
        drawn: list[Instance] = []
        order: list[Kind] = []
        for _ in range(count):
            order = order or rng.sample(KINDS, len(KINDS))
            instance = _draw(rng, order.pop(), used)
            used.add(normalised(instance.fixed))
            drawn.append(instance)
        splits.append(tuple(drawn))
    heldout, train = splits
    assert not {normalised(i.fixed) for i in train} & {normalised(i.fixed) for i in heldout}
    assert not {normalised(i.broken) for i in train} & {normalised(i.broken) for i in heldout}
    return train, heldout


def task(instance: Instance, split: str, number: int) -> dict[str, Any]:
    """The instance as a task of `POST /v1/suites`."""
    path = f"{instance.module}.py"
    return {
        "name": f"{SUITE}/{split}/{number:04}-{instance.kind}",
        "split": split,
        "instruction": f"Fix {path}.",
        "workspace": {"files": {path: instance.broken, f"test_{path}": instance.visible_tests}},
        "tools": list(TOOLS),
        "grader": {
            "kind": "tests",
            "files": {"test_hidden.py": instance.hidden_tests},
            "editable": [path],
            "timeout_s": GRADER_TIMEOUT_S,
        },
        "tags": [f"kind:{instance.kind}", f"bug:{instance.bug}"],
    }


def generate_suite(seed: int, num_train: int, num_heldout: int, draw: Draw = Draw.PRACTICE) -> dict[str, Any]:
    """The body of `POST /v1/suites`. Raises ValueError where the kinds cannot give that many tasks."""
    train, heldout = draw_instances(seed, num_train, num_heldout, draw)
    tasks = [task(instance, "train", number) for number, instance in enumerate(train)]
    tasks += [task(instance, "heldout", number) for number, instance in enumerate(heldout)]
    version = f"{VERSION}.{draw}.{seed}.{num_train}.{num_heldout}"
    return {"name": SUITE, "version": version, "tasks": tasks}


def numbers_of_version(version: str) -> tuple[int, int, int, Draw]:
    """Seed, train size, held-out size and draw in a version of this generator; ValueError for any other."""
    maker, *rest = version.split(".")
    if maker != VERSION or len(rest) != 4:
        raise ValueError(f"version {version!r} is not of {SUITE} {VERSION}")
    seed, num_train, num_heldout = map(int, rest[1:])
    return seed, num_train, num_heldout, Draw(rest[0])
