"""Messages as the template sees them. Values only; turning them into ids is `template`'s business."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.rollout.chat.tool_calls import ToolRequest

# A tool as chat templates expect it: {"type": "function", "function": {"name", "description", "parameters"}},
# or the inner object alone.
ToolSchema = Mapping[str, object]


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    `content` of an assistant message is the turn's text as decoded, calls included, unless `tool_calls`
    lists them. `name` and `call_id` belong to tool messages: the tool that answered and the call it answers.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolRequest, ...] = ()
    name: str = ""
    call_id: str = ""
