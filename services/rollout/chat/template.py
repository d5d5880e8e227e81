"""The chat template: ids of the first prompt, and of what each later prompt adds.

Owns how a conversation becomes ids. What a template would write after a turn is found by rendering
a short stand-in conversation with and without the new messages and keeping the difference: so headers
that depend on the message before, default system prompts and the line end after the end-of-turn token
come out as in the whole conversation, at the cost of the new messages only.

Invariants
- `open` + turn + `delta` + turn + `delta` ... are the ids of the whole conversation rendered at once,
  where the template keeps earlier turns (`TemplateReport.appends_after_tool`, `appends_after_user`).
- Exactly the template's own BOS, system prompt and tags; none is added twice.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from practicum.errors import InvalidInput
from practicum.trajectory import Ids, MaskReason
from services.rollout.chat.frame import ContextPiece, Frame, Slots
from services.rollout.chat.hermes import HermesFormat
from services.rollout.chat.jinja import TemplateProgram
from services.rollout.chat.messages import Message, Role, ToolSchema
from services.rollout.chat.probe import inspect_template
from services.rollout.chat.shapes import (
    Shape,
    described_tools,
    json_shape,
    message_shape,
    tagged_text,
    turn_shape,
    with_instructions,
)
from services.rollout.chat.tokenizer import ChatTokenizer
from services.rollout.chat.tool_calls import ParsedTurn, parse_turn

_MAX_CACHED_FRAMES = 256

# One message as far as it decides what the template writes: its role and which of its texts are there.
_MessageKey = tuple[Role, bool, bool, bool]


class ChatTemplate:
    """Renders conversations to ids. Safe to share between episodes.

    Attributes: `tokenizer`, `report`, `call_format`, `fingerprint` (SHA-256 hex of the template source).
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        source: str,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`now` is the time that templates may print.

        Raises `InvalidInput` where the template cannot frame a tool loop.
        """
        self.fingerprint = hashlib.sha256(source.encode()).hexdigest()
        self.call_format = HermesFormat()
        self._program = TemplateProgram(source, tokenizer.special_tokens, now)
        self.report = inspect_template(self._program, tokenizer)
        self.tokenizer = tokenizer.with_stop_ids(self.report.stop_ids)
        self._frames: dict[tuple[_MessageKey, ...], Frame] = {}

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Tokenizer and template of a Hugging Face folder.

        Raises `InvalidInput` where a file is missing, or the template cannot frame a tool loop.
        """
        tokenizer = ChatTokenizer.load(folder)
        if not tokenizer.chat_template:
            raise InvalidInput("chat_template.jinja", f"there is no chat template in {folder}")
        return cls(tokenizer, tokenizer.chat_template)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which the engine must stop a turn."""
        return self.tokenizer.stop_ids

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Ids:
        """The whole prompt: system text, tools, messages and the generation prompt.

        Earlier assistant turns may be among `messages`; empty ones are left out. Raises `InvalidInput` where
        the template refuses the conversation.
        """
        slots = Slots()
        tools_shape = described_tools(tools, slots)
        if any(isinstance(part, int) for part in self.tokenizer.split_frame(json.dumps(tools_shape))):
            raise InvalidInput("tools", "a name or type holds the text of a control token")
        shapes = [
            message_shape(message, slots, self.call_format.tags, self.report.thinking_prefix)
            for message in messages
            if message.role is not Role.ASSISTANT or message.content or message.tool_calls
        ]
        if tools and not self.report.supports_tools:
            shapes = with_instructions(shapes, self.call_format.instructions(tools_shape))
            tools_shape = []
        rendered = self._program.render(shapes, tools=tools_shape, add_generation_prompt=True)
        return Frame.cut(rendered, slots, self.tokenizer).ids(slots.texts, self.tokenizer)

    def appends(self, messages: Sequence[Message]) -> bool:
        """True where `delta(messages)` continues the row.

        False where the template rewrites earlier turns when these messages follow: then the next prompt is
        `open(all messages so far)`, for `Ledger.replace_prompt`.
        """
        if all(message.role is Role.TOOL for message in messages):
            return self.report.appends_after_tool
        return self.report.appends_after_user

    def delta(self, messages: Sequence[Message], *, last_sampled_id: int | None) -> tuple[ContextPiece, ...]:
        """What to append after a finished turn: the rest of its ending, `messages`, a generation prompt.

        `last_sampled_id`: the last id of the turn (None where it is empty). Where it is the token that ends
        the turn it is not added again; where the turn ended without one (a stop string), one is added with
        the reason INJECTED. Never call this for a turn cut by its token limit: that episode is over.
        Costs the tokens of `messages`, whatever the length of the conversation.
        """
        texts: list[str] = []
        tool_slots: set[int] = set()
        shape: list[_MessageKey] = []
        for message in messages:
            if message.role is Role.ASSISTANT or message.tool_calls:
                raise ValueError("a delta takes what others say; assistant turns are sampled")
            if message.content and message.role is Role.TOOL:
                tool_slots.add(len(texts))
            given = (message.content, message.name, message.call_id)
            texts.extend(text for text in given if text)
            shape.append((message.role, bool(given[0]), bool(given[1]), bool(given[2])))
        ending, rest = self._frame(tuple(shape)).split_after_first_control()
        pieces = rest.pieces(texts, self.tokenizer, frozenset(tool_slots))
        if last_sampled_id is not None and last_sampled_id == ending.first_control_id():
            return pieces
        injected = ContextPiece(ids=ending.ids(texts, self.tokenizer), reason=MaskReason.INJECTED)
        return (injected, *pieces)

    def encode_turn(self, text: str, tool_calls: Sequence[tuple[str, Mapping[str, object]]] = ()) -> Ids:
        """Ids of an assistant turn as the policy would have written it, up to and with the end-of-turn token.

        For demonstrations: `tool_calls` are (name, arguments) pairs, written in the template's own form.
        Raises `InvalidInput` for a template whose turns have no end of their own.
        """
        end_id = self.report.end_of_turn_id
        if end_id is None:
            raise InvalidInput("chat_template", "ends a turn with the next message, so none stands alone")
        slots = Slots()
        written = self._turn_by_template(text, tool_calls, slots)
        if written is None:
            calls = [
                self.call_format.render_call(slots.put(name), json_shape(arguments, slots))
                for name, arguments in tool_calls
            ]
            body = tagged_text(text, slots, self.call_format.tags)
            written = "\n".join([body, *calls] if body else calls) + self.tokenizer.token_text(end_id)
        turn = Frame.cut(written, slots, self.tokenizer).up_to_last(end_id)
        if turn is None:
            raise InvalidInput("chat_template", "does not end the last turn of a conversation")
        return turn.ids(slots.texts, self.tokenizer)

    def parse_turn(self, text: str, *, is_cut: bool = False) -> ParsedTurn:
        """Thinking, prose and calls of a turn's text; see `tool_calls.parse_turn`."""
        return parse_turn(text, self.call_format, is_cut=is_cut, thinking_open=self.report.opens_thinking)

    def render_tool_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """The text of one call in this model's form."""
        return self.call_format.render_call(name, arguments)

    def _frame(self, shape: tuple[_MessageKey, ...]) -> Frame:
        """The frame of a delta; it depends on the messages' shape only, so episodes share it."""
        frame = self._frames.get(shape)
        if frame is None:
            if len(self._frames) >= _MAX_CACHED_FRAMES:
                self._frames.clear()
            frame = self._frames[shape] = self._render_frame(shape)
        return frame

    def _render_frame(self, shape: tuple[_MessageKey, ...]) -> Frame:
        slots, base = Slots(), Slots()
        messages: list[Shape] = [
            {"role": "user", "content": base.put("task")},
            {"role": "assistant", "content": base.put("turn")},
        ]
        for role, has_content, has_name, has_call_id in shape:
            message = Message(
                role=role,
                content="text" if has_content else "",
                name="text" if has_name else "",
                call_id="text" if has_call_id else "",
            )
            messages.append(message_shape(message, slots, self.call_format.tags))
        rendered = self._program.render(messages, add_generation_prompt=True)
        return Frame.cut(rendered[base.end_of(1, rendered) :], slots, self.tokenizer)

    def _turn_by_template(
        self, text: str, tool_calls: Sequence[tuple[str, Mapping[str, object]]], slots: Slots
    ) -> str | None:
        """The turn as the template writes it after its generation prompt; None where it begins otherwise."""
        if tool_calls and not self.report.writes_tool_calls:
            return None
        user: Shape = {"role": "user", "content": slots.put("task")}
        turn = turn_shape(text, tool_calls, slots, self.call_format.tags)
        prompt = self._program.render([user], add_generation_prompt=True)
        rendered = self._program.render([user, turn], add_generation_prompt=False)
        return rendered[len(prompt) :] if rendered.startswith(prompt) else None
