"""Scripted episodes for the warm start: the form always right, the fix right in about a third.

Owns the wrong edits, which are of two styles that a policy can tell apart in any kind: a nudge of the
returned value, where no bug is, and a wrong change in the right place. Never shows the right fix in a wrong
demonstration: a wrong edit is kept only where the hidden tests fail on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from examples.first_bugs.suite import Instance, draw_instances, numbers_of_version
from examples.first_bugs.verify import passes


class Style(StrEnum):
    """What a demonstration's edit does."""

    FIX = "fix"
    NUDGED_RESULT = "nudged_result"  # one more than what is returned
    WRONG_FIX = "wrong_fix"  # another change where the bug is


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """The assistant's tool calls of one scripted episode of a task."""

    task: str
    style: Style
    calls: tuple[dict[str, Any], ...]  # {"name": ..., "arguments": {...}}

    @property
    def right(self) -> bool:
        """Whether its edit is the fix."""
        return self.style is Style.FIX


def demonstrations(
    suite: dict[str, Any], seed: int, share_right: float = 1 / 3, each: int = 1
) -> list[Demonstration]:
    """`each` demonstrations of every train task, right with probability `share_right`.

    The fixes are no part of a suite: its instances are drawn again by the numbers in its version. Raises
    ValueError for a suite that `generate_suite` did not make.
    """
    train, heldout = draw_instances(*numbers_of_version(suite["version"]))
    rng = Random(f"{seed}/demonstrations")
    tasks = list(zip([*train, *heldout], suite["tasks"], strict=True))
    # Round by round, so that a batch never holds one task twice.
    return [
        _demonstrate(instance, task["name"], share_right, rng)
        for _ in range(each)
        for instance, task in tasks
        if task["split"] == "train"
    ]


def _demonstrate(instance: Instance, task: str, share_right: float, rng: Random) -> Demonstration:
    style, (old, new) = Style.FIX, (instance.buggy, instance.right)
    edits = dict(wrong_edits(instance))
    if edits and rng.random() >= share_right:
        style = rng.choice(sorted(edits))
        old, new = edits[style]
    path = f"{instance.module}.py"
    calls = (
        {"name": "read_file", "arguments": {"path": path}},
        {"name": "edit_file", "arguments": {"path": path, "old": old, "new": new}},
        {"name": "run_tests", "arguments": {}},
        {"name": "finish", "arguments": {}},
    )
    return Demonstration(task=task, style=style, calls=calls)


def wrong_edits(instance: Instance) -> Iterator[tuple[Style, tuple[str, str]]]:
    """The (old, new) edits of the wrong styles that apply: `old` stands once, the hidden tests fail after."""
    edits = (
        (Style.NUDGED_RESULT, "return ", "return 1 + "),
        (Style.WRONG_FIX, instance.buggy, f"{instance.buggy} + 1"),
        (Style.WRONG_FIX, instance.buggy, f"{instance.buggy} - 1"),  # where one more happens to be right
    )
    found: set[Style] = set()
    for style, old, new in edits:
        edited = instance.broken.replace(old, new)
        applies = instance.broken.count(old) == 1 and new != instance.right
        if style not in found and applies and not passes(edited, instance.hidden_tests):
            found.add(style)
            yield style, (old, new)
