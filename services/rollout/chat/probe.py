"""What a chat template does, found out once when it is loaded by rendering small conversations."""

from collections.abc import Sequence
from dataclasses import dataclass

from practicum.errors import InvalidInput
from services.rollout.chat.frame import Slots
from services.rollout.chat.jinja import TemplateProgram
from services.rollout.chat.shapes import Shape
from services.rollout.chat.tokenizer import ChatTokenizer
from services.rollout.chat.tool_calls import THINK_CLOSE, THINK_OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What was found out about a template; log it at start-up."""

    end_of_turn_id: int | None  # None: the next message's first token ends the turn
    stop_ids: tuple[int, ...]  # the control tokens that may follow a turn's text
    thinking_prefix: str  # what the generation prompt already wrote of a thinking block, "" for nothing
    supports_tools: bool  # the template writes the tools; else they go into the system message
    writes_tool_calls: bool  # the template writes `tool_calls` of an assistant message
    appends_after_tool: bool  # False: tool messages make it rewrite earlier turns
    appends_after_user: bool  # False: user messages make it rewrite earlier turns (Qwen3 drops thinking)

    @property
    def opens_thinking(self) -> bool:
        """The generation prompt ends inside a thinking block."""
        return bool(self.thinking_prefix)


def inspect_template(program: TemplateProgram, tokenizer: ChatTokenizer) -> TemplateReport:
    """Render small conversations and report. Raises `InvalidInput` where a tool loop cannot be framed."""
    probe = _Probe(program)
    generation_prompt = probe.generation_prompt()
    opening = generation_prompt.rfind(THINK_OPEN)
    is_open = opening >= 0 and THINK_CLOSE not in generation_prompt[opening:]
    thinking_prefix = generation_prompt[opening:] if is_open else ""
    before_tool = probe.after_turn([probe.tool])
    if probe.slots.end_of(probe.tool_index, before_tool) < 0:
        raise InvalidInput("chat_template", "leaves out the content of tool messages")
    end_id = _first_control_id(tokenizer, probe.after_turn([], add_generation_prompt=False))
    following = (end_id, _first_control_id(tokenizer, before_tool), probe.before_user_id(tokenizer))
    return TemplateReport(
        end_of_turn_id=end_id,
        stop_ids=tuple(dict.fromkeys(token_id for token_id in following if token_id is not None)),
        thinking_prefix=thinking_prefix,
        supports_tools=probe.supports_tools(),
        writes_tool_calls=probe.writes_tool_calls(),
        appends_after_tool=probe.appends(probe.tool, thinking_prefix),
        appends_after_user=probe.appends(probe.user, thinking_prefix),
    )


def _first_control_id(tokenizer: ChatTokenizer, text: str) -> int | None:
    return next((part for part in tokenizer.split_frame(text) if isinstance(part, int)), None)


class _Probe:
    """Stand-in messages and the questions asked with them."""

    def __init__(self, program: TemplateProgram) -> None:
        self._program = program
        self.slots = Slots()
        self.user: Shape = {"role": "user", "content": self.slots.put("task")}
        self._turn_text = self.slots.put("turn")
        self._turn_index = len(self.slots.texts) - 1
        self.tool: Shape = {"role": "tool", "content": self.slots.put("result")}
        self.tool_index = len(self.slots.texts) - 1

    def generation_prompt(self) -> str:
        """What opens the assistant's turn."""
        closed = self._program.render([self.user], add_generation_prompt=False)
        opened = self._program.render([self.user], add_generation_prompt=True)
        if not opened.startswith(closed) or opened == closed:
            raise InvalidInput("chat_template", "has no generation prompt that follows the conversation")
        return opened[len(closed) :]

    def after_turn(self, messages: Sequence[Shape], *, add_generation_prompt: bool = True) -> str:
        """What the template writes after an assistant turn that `messages` follow."""
        turn: Shape = {"role": "assistant", "content": self._turn_text}
        conversation = [self.user, turn, *messages]
        rendered = self._program.render(conversation, add_generation_prompt=add_generation_prompt)
        end = self.slots.end_of(self._turn_index, rendered)
        if end < 0:
            raise InvalidInput("chat_template", "leaves out or changes the content of assistant messages")
        return rendered[end:]

    def before_user_id(self, tokenizer: ChatTokenizer) -> int | None:
        """The control token between a turn and a user message; None where the template refuses that order."""
        try:
            return _first_control_id(tokenizer, self.after_turn([self.user]))
        except InvalidInput:
            return None

    def supports_tools(self) -> bool:
        """True where the template writes the tools it is given."""
        name = self.slots.put("tool")
        index = len(self.slots.texts) - 1
        parameters = {"type": "object", "properties": {}}
        function = {"name": name, "description": "what it does", "parameters": parameters}
        tool = {"type": "function", "function": function}
        try:
            rendered = self._program.render([self.user], tools=[tool], add_generation_prompt=True)
        except InvalidInput:
            return False
        return self.slots.end_of(index, rendered) >= 0

    def writes_tool_calls(self) -> bool:
        """True where the template writes name and arguments of `tool_calls`."""
        name, value = self.slots.put("tool"), self.slots.put("value")
        index = len(self.slots.texts) - 1
        call = {"type": "function", "function": {"name": name, "arguments": {"key": value}}}
        turn: Shape = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            rendered = self._program.render([self.user, turn], add_generation_prompt=False)
        except InvalidInput:
            return False
        return min(self.slots.end_of(index - 1, rendered), self.slots.end_of(index, rendered)) >= 0

    def appends(self, following: Shape, thinking_prefix: str) -> bool:
        """True where prompt, turns and deltas one after the other are the whole conversation rendered.

        The turns think, since thinking is what templates drop from the history.
        """
        turns = [
            f"{THINK_OPEN}\n{self.slots.put('thought')}\n{THINK_CLOSE}\n\n{self.slots.put('answer')}"
            for _ in range(2)
        ]
        sampled = [turn.removeprefix(thinking_prefix) for turn in turns]
        first, second = (Shape(role="assistant", content=turn) for turn in turns)
        conversation = [self.user, first, self.tool, second, following]
        try:
            whole = self._program.render(conversation, add_generation_prompt=True)
            parts = (
                self._program.render([self.user], add_generation_prompt=True),
                sampled[0],
                self.after_turn([self.tool]),
                sampled[1],
                self.after_turn([following]),
            )
        except InvalidInput:
            return False
        return whole == "".join(parts)
