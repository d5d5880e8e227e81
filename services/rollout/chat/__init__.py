"""Chat: the frame around what the policy writes, as token ids, and the reading of its tool calls.

Owns the tokenizer, the chat template and the tool-call formats. Never imports torch or transformers,
never talks to an engine, keeps no state of an episode (the ledger does).

    chat = ChatTemplate.load(model_folder)
    prompt_ids = chat.open(messages, tools)              # system, tools, user, generation prompt
    ...                                                  # the engine samples a turn
    text = chat.tokenizer.decode(sampled_ids)
    turn = chat.parse_turn(text, is_cut=finish_reason == "length")
    for piece in chat.delta(tool_messages, last_sampled_id=sampled_ids[-1]):
        ledger.append_context(piece.ids, piece.reason)   # the next prompt: new tokens only

Invariants
- Text from outside (tool output, instruction, descriptions) never becomes a control id, and decodes
  byte for byte.
- What the policy wrote is never decoded and encoded again on the way to the next prompt.
- Any text parses: a bad call is a `CallProblem` for the model to read, never an exception.
"""

from services.rollout.chat.frame import ContextPiece
from services.rollout.chat.messages import Message, Role, ToolSchema
from services.rollout.chat.probe import TemplateReport
from services.rollout.chat.template import ChatTemplate
from services.rollout.chat.tokenizer import ChatTokenizer
from services.rollout.chat.tool_calls import CallProblem, ParsedTurn, ToolRequest, unknown_tool_message

__all__ = [
    "CallProblem",
    "ChatTemplate",
    "ChatTokenizer",
    "ContextPiece",
    "Message",
    "ParsedTurn",
    "Role",
    "TemplateReport",
    "ToolRequest",
    "ToolSchema",
    "unknown_tool_message",
]
