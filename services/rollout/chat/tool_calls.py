"""What a turn's text asks for: the values every tool-call format yields, and the scan of a turn.

Owns the order of things in a turn: thinking, prose, calls. How one call is written is a format's
business (`hermes`; one module a family). Any text gives a `ParsedTurn`; nothing here raises on what
a model wrote, and the scan is linear in the length of the text.

Policies, one switch for training and evaluation alike:
- a call inside thinking is no call; where thinking is never closed, no call of the turn after it runs,
  and the model is told so;
- a turn cut by its token limit runs nothing;
- calls before a malformed one run; the malformed one and everything after it do not, since where a broken
  call ends is a guess, and a guess might run text that was only an argument.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """One well-formed call. Whether the tool exists and the arguments fit is the tool's business."""

    call_id: str  # distinct within the turn: "call_0", "call_1", ...
    name: str
    arguments: Mapping[str, object]
    arguments_json: str  # the same arguments as JSON text in the order written, not ASCII-escaped


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProblem:
    """A call that cannot run. `message` is written for the model; `name` is "" where it is unknown."""

    call_id: str
    name: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A turn's text taken apart."""

    thinking: str  # the text inside thinking blocks, without the tags
    text: str  # the prose outside thinking and calls
    items: tuple[ToolRequest | CallProblem, ...]  # in the order written
    is_cut: bool  # True where the token limit ended the turn; `items` is empty then

    @property
    def calls(self) -> tuple[ToolRequest, ...]:
        """The calls to run, in order."""
        return tuple(item for item in self.items if isinstance(item, ToolRequest))

    @property
    def problems(self) -> tuple[CallProblem, ...]:
        """The calls that cannot run; the model gets each message as a tool message."""
        return tuple(item for item in self.items if isinstance(item, CallProblem))


class ToolCallFormat(Protocol):
    """How one family of models writes a call."""

    @property
    def opening(self) -> str:
        """The text that begins a call."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that are control tokens where the policy writes them and the vocabulary has them."""
        ...

    def parse_call(self, text: str, start: int, call_id: str) -> tuple[ToolRequest | CallProblem, int]:
        """Read the call whose opening begins at `start`; also the position after its end. Never raises."""
        ...

    def render_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """The text of a call, as the family's template writes it."""
        ...

    def instructions(self, tools: Sequence[Mapping[str, object]]) -> str:
        """System text that tells a model about its tools where the template does not."""
        ...


def parse_turn(
    text: str, call_format: ToolCallFormat, *, is_cut: bool = False, thinking_open: bool = False
) -> ParsedTurn:
    """Take a turn's text apart.

    `is_cut`: the turn did not end of itself (finish reason "length" or "abort").
    `thinking_open`: the generation prompt already opened a thinking block.
    """
    marks = re.compile("|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, call_format.opening))))
    thinking: list[str] = []
    prose: list[str] = []
    items: list[ToolRequest | CallProblem] = []
    position = unopened_end = 0
    if thinking_open and not text.lstrip().startswith(THINK_OPEN):
        position = _skip_thinking(text, 0, call_format, thinking, items)
    while mark := marks.search(text, position):
        prose.append(text[position : mark.start()])
        if mark[0] == THINK_OPEN:
            position = _skip_thinking(text, mark.end(), call_format, thinking, items)
        elif mark[0] == THINK_CLOSE:
            # A block that was closed but never opened: all before it was thinking, calls included.
            thinking, prose, items = [], [], []
            unopened_end, position = mark.start(), mark.end()
        else:
            item, position = call_format.parse_call(text, mark.start(), f"call_{len(items)}")
            items.append(item)
        if items and isinstance(items[-1], CallProblem):
            position = len(text)
    prose.append(text[position:])
    return ParsedTurn(
        thinking="\n".join(part.strip() for part in (text[:unopened_end], *thinking) if part.strip()),
        text="".join(prose).strip(),
        items=() if is_cut else tuple(items),
        is_cut=is_cut,
    )


def _skip_thinking(
    text: str,
    start: int,
    call_format: ToolCallFormat,
    thinking: list[str],
    items: list[ToolRequest | CallProblem],
) -> int:
    """Collect the thinking that begins at `start`; the position after it."""
    end = text.find(THINK_CLOSE, start)
    if end >= 0:
        thinking.append(text[start:end])
        return end + len(THINK_CLOSE)
    thinking.append(text[start:])
    if call_format.opening in text[start:]:
        message = f"error: the thinking block was not closed with {THINK_CLOSE}, so no call in it was run"
        items.append(CallProblem(call_id=f"call_{len(items)}", name="", message=message))
    return len(text)


def unknown_tool_message(name: str, known_names: Sequence[str]) -> str:
    """What the model reads when it calls a tool that does not exist."""
    return f"error: there is no tool {name!r}; the tools are: {', '.join(known_names)}"
