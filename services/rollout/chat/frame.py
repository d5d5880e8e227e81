"""Frames: rendered chat text with open slots where text from outside goes.

While a template runs, each text from outside is replaced by a stand-in that nobody can guess. What
comes out is cut at its control tokens first, and only then are the texts put in. So no text can make
a control token, and yet text and frame between two control tokens are encoded together, which gives
the ids a model saw in training (`user\\n` and the first word may share a token).

A stand-in carries a quotation mark: a template that writes the text inside JSON escapes it, which
tells how the text itself must be written there.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from practicum.errors import InvalidInput
from practicum.trajectory import Ids, MaskReason
from services.rollout.chat.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPiece:
    """Ids to append to the row, and why they are not trained."""

    ids: Ids
    reason: MaskReason  # PROMPT, TOOL or INJECTED


class Slots:
    """The texts of one rendering and their stand-ins."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)
        self._pattern = re.compile(rf'{self._key}:(\d+)(\\?)"{self._key}')
        self.texts: list[str] = []

    def put(self, text: str) -> str:
        """A stand-in for `text`; empty text stays empty, since templates ask whether there is any."""
        if not text:
            return ""
        self.texts.append(text)
        return f'{self._key}:{len(self.texts) - 1}"{self._key}'

    def find(self, rendered: str) -> list[re.Match[str]]:
        """Every stand-in, in order: group 1 is the index of its text, group 2 is not empty inside JSON."""
        return list(self._pattern.finditer(rendered))

    def end_of(self, index: int, rendered: str) -> int:
        """The position after the last occurrence of a text's stand-in; -1 where the template dropped it."""
        return max((match.end() for match in self.find(rendered) if int(match[1]) == index), default=-1)

    def split(self, text: str) -> tuple["str | Slot", ...]:
        """Literal text and slots in turn. Raises `InvalidInput` where a stand-in came out changed."""
        parts: list[str | Slot] = []
        position = 0
        for match in self.find(text):
            if match.start() > position:
                parts.append(text[position : match.start()])
            parts.append(Slot(index=int(match[1]), is_json=bool(match[2])))
            position = match.end()
        if position < len(text):
            parts.append(text[position:])
        if any(isinstance(part, str) and self._key in part for part in parts):
            raise InvalidInput(
                "chat_template", "changes the text of messages, so that it cannot be kept exact"
            )
        return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for the text number `index`."""

    index: int
    is_json: bool  # inside a JSON string, where quotes and line ends are escaped

    def written(self, texts: Sequence[str]) -> str:
        """The text as it stands in this place."""
        text = texts[self.index]
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.is_json else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Rendered text cut at its control tokens: an id, ids of fixed text, or text with slots."""

    parts: tuple["int | Ids | tuple[str | Slot, ...]", ...]

    @classmethod
    def cut(cls, rendered: str, slots: Slots, tokenizer: ChatTokenizer) -> "Frame":
        """Cut rendered text whose slots are still open."""
        parts: list[int | Ids | tuple[str | Slot, ...]] = []
        for part in tokenizer.split_frame(rendered):
            if isinstance(part, int):
                parts.append(part)
                continue
            pieces = slots.split(part)
            fixed = all(isinstance(piece, str) for piece in pieces)
            parts.append(tokenizer.encode_text(part) if fixed else pieces)
        return cls(parts=tuple(parts))

    def first_control_id(self) -> int | None:
        """The first control id; None where there is none."""
        return next((part for part in self.parts if isinstance(part, int)), None)

    def split_after_first_control(self) -> tuple["Frame", "Frame"]:
        """The parts up to and with the first control id, and those after it."""
        for index, part in enumerate(self.parts):
            if isinstance(part, int):
                return Frame(parts=self.parts[: index + 1]), Frame(parts=self.parts[index + 1 :])
        return Frame(parts=()), self

    def up_to_last(self, control_id: int) -> "Frame | None":
        """The parts up to and with the last occurrence of a control id; None where it does not occur."""
        for index in reversed(range(len(self.parts))):
            part = self.parts[index]
            if isinstance(part, int) and part == control_id:
                return Frame(parts=self.parts[: index + 1])
        return None

    def pieces(
        self,
        texts: Sequence[str],
        tokenizer: ChatTokenizer,
        tool_slots: frozenset[int] = frozenset(),
    ) -> tuple[ContextPiece, ...]:
        """Ids with the texts put in: TOOL where a slot of `tool_slots` takes part, else PROMPT."""
        runs: list[tuple[MaskReason, list[Ids]]] = []
        for part in self.parts:
            reason = MaskReason.PROMPT
            if isinstance(part, int):
                ids = np.array([part], dtype=np.int32)
            elif isinstance(part, tuple):
                text = "".join(piece if isinstance(piece, str) else piece.written(texts) for piece in part)
                ids = tokenizer.encode_text(text)
                if any(isinstance(piece, Slot) and piece.index in tool_slots for piece in part):
                    reason = MaskReason.TOOL
            else:
                ids = part
            if runs and runs[-1][0] is reason:
                runs[-1][1].append(ids)
            else:
                runs.append((reason, [ids]))
        return tuple(ContextPiece(ids=np.concatenate(run), reason=reason) for reason, run in runs)

    def ids(self, texts: Sequence[str], tokenizer: ChatTokenizer) -> Ids:
        """All ids with the texts put in."""
        pieces = self.pieces(texts, tokenizer)
        return np.concatenate([piece.ids for piece in pieces]) if pieces else np.empty(0, dtype=np.int32)
