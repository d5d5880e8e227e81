"""Messages and tools as templates read them, with every text from outside replaced by its stand-in.

Which texts are whose: the tags of thinking and calls in an assistant's turn are the model's own control
tokens and stay; everything between them, and all that users, tools and tool descriptions say, is text.
"""

import re
from collections.abc import Mapping, Sequence

from services.rollout.chat.frame import Slots
from services.rollout.chat.messages import Message, Role, ToolSchema
from services.rollout.chat.tool_calls import THINK_CLOSE, THINK_OPEN

Shape = dict[str, object]


def message_shape(message: Message, slots: Slots, tags: Sequence[str], thinking_prefix: str = "") -> Shape:
    """A message for a template; texts go into slots in the order content, name, call id.

    `thinking_prefix` is what the generation prompt wrote of a turn's thinking: a turn decoded from sampled
    ids lacks it, and gets it back.
    """
    if message.role is not Role.ASSISTANT:
        shape: Shape = {"role": message.role.value, "content": slots.put(message.content)}
        if message.name:
            shape["name"] = slots.put(message.name)
        if message.call_id:
            shape["tool_call_id"] = slots.put(message.call_id)
        return shape
    content = message.content
    if thinking_prefix and THINK_CLOSE in content and THINK_OPEN not in content:
        content = thinking_prefix + content
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return turn_shape(content, calls, slots, tags)


def turn_shape(
    text: str, tool_calls: Sequence[tuple[str, Mapping[str, object]]], slots: Slots, tags: Sequence[str]
) -> Shape:
    """An assistant's turn for a template."""
    shape: Shape = {"role": Role.ASSISTANT.value, "content": tagged_text(text, slots, tags)}
    if tool_calls:
        shape["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": slots.put(name), "arguments": json_shape(arguments, slots)},
            }
            for name, arguments in tool_calls
        ]
    return shape


def tagged_text(text: str, slots: Slots, tags: Sequence[str]) -> str:
    """A turn's text with its tags left in and the rest in slots.

    White space beside a tag stays as well, since templates that know about thinking trim it.
    """
    pattern = "|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, *tags)))
    parts = re.split(f"({pattern})", text)
    return "".join(part if index % 2 else _put_core(part, slots) for index, part in enumerate(parts))


def _put_core(text: str, slots: Slots) -> str:
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return text[:start] + slots.put(core) + text[start + len(core) :]


def json_shape(value: Mapping[str, object], slots: Slots) -> dict[str, object]:
    """Arguments with every string, keys included, in a slot."""
    return {slots.put(key): _leaf_shape(item, slots) for key, item in value.items()}


def _leaf_shape(value: object, slots: Slots) -> object:
    if isinstance(value, str):
        return slots.put(value)
    if isinstance(value, Mapping):
        return json_shape(value, slots)
    if isinstance(value, list | tuple):
        return [_leaf_shape(item, slots) for item in value]
    return value


def described_tools(tools: Sequence[ToolSchema], slots: Slots) -> list[Shape]:
    """Tools with their descriptions in slots; names and types stay, since templates look at them."""
    return [_described(tool, slots) for tool in tools]


def _described(schema: Mapping[str, object], slots: Slots) -> Shape:
    shape: Shape = {}
    for key, value in schema.items():
        if key == "description" and isinstance(value, str):
            shape[key] = slots.put(value)
        elif isinstance(value, Mapping):
            shape[key] = _described(value, slots)
        else:
            shape[key] = value
    return shape


def with_instructions(shapes: Sequence[Shape], instructions: str) -> list[Shape]:
    """The conversation with tool instructions at the end of its system message, which is made if need be."""
    if shapes and shapes[0]["role"] == Role.SYSTEM.value:
        content = f"{shapes[0]['content']}\n\n{instructions}".strip()
        return [{**shapes[0], "content": content}, *shapes[1:]]
    return [{"role": Role.SYSTEM.value, "content": instructions}, *shapes]
