"""Scripted episodes that try again: the first edit is mostly wrong, the tests fail, another edit follows.

Owns the last round of the warm start. What it teaches is the form of trying again; that it pays to do so
until the tests pass is left to reinforcement, since a second try is right no more often than a first.
"""

from random import Random
from typing import Any

from examples.first_bugs.demonstrations import Demonstration, Style, wrong_edits
from examples.first_bugs.suite import Instance, draw_instances, numbers_of_version
from examples.first_bugs.verify import passes

SHARE_RIGHT_AT_ONCE = 0.22
SHARE_TRYING_AGAIN = 0.6  # of those whose tests failed; the others finish as they are
SHARE_RIGHT_AT_SECOND = 0.3

Edit = tuple[str, str]  # (old, new)


def second_tries(suite: dict[str, Any], seed: int) -> list[Demonstration]:
    """One demonstration of every train task, right in the end in about a third.

    Raises ValueError for a suite that `generate_suite` did not make.
    """
    train, _ = draw_instances(*numbers_of_version(suite["version"]))
    rng = Random(f"{seed}/second-tries")
    names = [task["name"] for task in suite["tasks"] if task["split"] == "train"]
    return [_demonstrate(instance, name, rng) for instance, name in zip(train, names, strict=True)]


def _demonstrate(instance: Instance, task: str, rng: Random) -> Demonstration:
    edits = dict(wrong_edits(instance))
    fix = (instance.buggy, instance.right)
    if not edits or rng.random() < SHARE_RIGHT_AT_ONCE:
        return _scripted(instance, task, Style.FIX, [[fix]])
    style = rng.choice(sorted(edits))
    tries = [[edits[style]]]
    if rng.random() < SHARE_TRYING_AGAIN:
        is_right = rng.random() < SHARE_RIGHT_AT_SECOND
        tries.append(_second_try(instance, style, edits, is_right=is_right))
        style = Style.FIX if is_right else style
    return _scripted(instance, task, style, tries)


def _second_try(instance: Instance, style: Style, edits: dict[Style, Edit], *, is_right: bool) -> list[Edit]:
    """The edits that follow a failed first one: its place is mended first, whatever comes of it."""
    old, new = edits[style]
    if style is Style.WRONG_FIX:
        return [(new, instance.right if is_right else _still_wrong(instance, new))]
    undone = (new, old)
    again = edits.get(Style.WRONG_FIX)
    if is_right:
        return [undone, (instance.buggy, instance.right)]
    return [undone] if again is None else [undone, again]


def _still_wrong(instance: Instance, tried: str) -> str:
    """Another change at the same place that the hidden tests do not accept."""
    for candidate in (f"{instance.right} + 1", f"{tried} + 1"):
        edited = instance.broken.replace(instance.buggy, candidate)
        if not passes(edited, instance.hidden_tests):
            return candidate
    return instance.buggy


def _scripted(instance: Instance, task: str, style: Style, tries: list[list[Edit]]) -> Demonstration:
    path = f"{instance.module}.py"
    calls: list[dict[str, Any]] = [{"name": "read_file", "arguments": {"path": path}}]
    for edits in tries:
        calls += [
            {"name": "edit_file", "arguments": {"path": path, "old": old, "new": new}} for old, new in edits
        ]
        calls.append({"name": "run_tests", "arguments": {}})
    calls.append({"name": "finish", "arguments": {}})
    return Demonstration(task=task, style=style, calls=tuple(calls))
