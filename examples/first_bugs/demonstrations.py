"""Scripted episodes for the warm start: the form always right, the fix right in about a third.

Owns the wrong edits, which are of three styles that a policy can tell apart in any kind: a nudge of the returned
value, a change of a line that has no bug, and another change in the right place. Never shows the right fix in a
wrong demonstration: a wrong edit is kept only where the hidden tests fail on it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from examples.first_bugs.suite import Instance, draw_instances, numbers_of_version
from examples.first_bugs.verify import passes

_SWAPS = (
    ("<=", "=="),
    (">=", "=="),
    ("==", ">="),
    ("!=", "<="),
    (" < ", " == "),
    (" > ", " == "),
    ("+=", "*="),
    ("-=", "*="),
    ("*=", "-="),
    (" // ", " + "),
    (" + ", " // "),
    (" - ", " * "),
    (" * ", " - "),
    (" % ", " + "),
    (" and ", " == "),
    (" or ", " == "),
)
_LONGEST_PIECES = 3  # space-separated pieces in an edited fragment


class Style(StrEnum):
    """What a demonstration's edit does."""

    FIX = "fix"
    NUDGED_RESULT = "nudged_result"  # one more than what is returned
    WRONG_LINE = "wrong_line"  # a change where no bug is
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


def demonstrations(suite: dict[str, Any], seed: int, share_right: float = 1 / 3, each: int = 1) -> list[Demonstration]:
    """`each` demonstrations of every train task, right with probability `share_right`.

    The fixes are no part of a suite: its instances are drawn again by the numbers in its version. Raises ValueError
    for a suite that `generate_suite` did not make.
    """
    train, heldout = draw_instances(*numbers_of_version(suite["version"]))
    rng = Random(f"{seed}/demonstrations")
    shown = []
    for instance, task in zip([*train, *heldout], suite["tasks"], strict=True):
        if task["split"] == "train":
            shown += [_demonstrate(instance, task["name"], share_right, rng) for _ in range(each)]
    return shown


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
    """The (old, new) edits of each wrong style that apply: `old` stands once, and the hidden tests fail after."""
    lines = [line.strip() for line in instance.broken.splitlines()[2:]]  # 2: the def line and the docstring
    places = {
        Style.NUDGED_RESULT: [(old, f"{old} + 1") for old in _tails(lines[-1])],
        Style.WRONG_LINE: [
            (old, changed)
            for line in lines
            if instance.buggy not in line
            for old in _tails(line)
            for changed in _changes(old)
        ],
        Style.WRONG_FIX: [(instance.buggy, changed) for changed in _changes(instance.buggy)],
    }
    for style, edits in places.items():
        for old, new in edits:
            edited = instance.broken.replace(old, new)
            if instance.broken.count(old) == 1 and new != instance.right and not passes(edited, instance.hidden_tests):
                yield style, (old, new)
                break


def _tails(line: str) -> Iterator[str]:
    """Ends of a line at a space, the shortest that may stand alone first, and without the colon of a block."""
    pieces = line.removesuffix(":").split(" ")
    for count in range(min(2, len(pieces)), _LONGEST_PIECES + 1):
        yield " ".join(pieces[-count:])


def _changes(fragment: str) -> Iterator[str]:
    """Wrong variants of a fragment: its operator swapped, its last number raised, or one added."""
    for operator, other in _SWAPS:
        if operator in fragment:
            yield fragment.replace(operator, other, 1)
    if match := re.search(r"\d+(?!.*\d)", fragment):
        yield f"{fragment[: match.start()]}{int(match[0]) + 1}{fragment[match.end() :]}"
    yield f"{fragment} + 1"
