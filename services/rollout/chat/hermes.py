"""Hermes and Qwen calls: one JSON object between `<tool_call>` and `</tool_call>`.

The JSON decoder, not a search for the closing tag, finds where a call ends, so that a tag inside a
string is only text. Choices where models and JSON readers differ:
- line ends and tabs inside strings are accepted as they are;
- NaN, infinities and a key given twice are errors, since readers disagree about them;
- arguments given as a JSON string are read once; missing arguments are `{}`;
- a call without its closing tag is an error, however complete its JSON looks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from services.rollout.chat.tool_calls import CallProblem, ToolRequest

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"
_WHITE_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,64})"')
_MAX_DETAIL_CHARS = 120


class _BadValue(ValueError):
    """JSON that parses, with a value no call may hold."""


class HermesFormat:
    """See `tool_calls.ToolCallFormat`."""

    opening = _OPENING
    tags = (_OPENING, _CLOSING)

    def parse_call(self, text: str, start: int, call_id: str) -> tuple[ToolRequest | CallProblem, int]:
        """Read the call whose opening begins at `start`; also the position after its end. Never raises."""
        begin = _skip_space(text, start + len(_OPENING))
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except RecursionError:
            return _problem(text, begin, call_id, "its JSON is nested too deeply"), len(text)
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
                return _problem(text, begin, call_id, "it is cut off, its JSON does not end"), len(text)
            detail = f"its JSON is not valid: {error.msg} at character {error.pos - begin}"
            return _problem(text, begin, call_id, detail), len(text)
        except ValueError as error:
            return _problem(text, begin, call_id, f"its JSON is not valid: {error}"), len(text)
        end = _skip_space(text, end)
        if not text.startswith(_CLOSING, end):
            return _problem(text, begin, call_id, f"{_CLOSING} does not follow its JSON"), len(text)
        try:
            request = _request(value, call_id)
        except RecursionError:
            return _problem(text, begin, call_id, "its JSON is nested too deeply"), len(text)
        except ValueError as error:
            return _problem(text, begin, call_id, str(error)), end + len(_CLOSING)
        return request, end + len(_CLOSING)

    def render_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """The text of a call, as the family's template writes it."""
        body = (
            f'{{"name": {json.dumps(name, ensure_ascii=False)}, '
            f'"arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
        )
        return f"{_OPENING}\n{body}\n{_CLOSING}"

    def instructions(self, tools: Sequence[Mapping[str, object]]) -> str:
        """System text that tells a model about its tools where the template does not."""
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "You may call these tools:\n<tools>\n"
            f"{signatures}\n</tools>\n"
            "To call one, write its name and arguments as a JSON object between tags:\n"
            f'{_OPENING}\n{{"name": <tool-name>, "arguments": <arguments-object>}}\n{_CLOSING}'
        )


def _request(value: object, call_id: str) -> ToolRequest:
    if not isinstance(value, dict):
        raise _BadValue("it must be one JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _BadValue('"name" must be the name of a tool, as a string')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _decode_whole(arguments)
    if not isinstance(arguments, dict):
        raise _BadValue('"arguments" must be a JSON object')
    arguments_json = json.dumps(arguments, ensure_ascii=False)
    try:
        (name + arguments_json).encode()
    except UnicodeEncodeError:
        raise _BadValue("it holds half of a surrogate pair, which is no character") from None
    return ToolRequest(call_id=call_id, name=name, arguments=arguments, arguments_json=arguments_json)


def _decode_whole(text: str) -> object:
    try:
        value, end = _DECODER.raw_decode(text, _skip_space(text, 0))
    except RecursionError:
        raise _BadValue('"arguments" are nested too deeply') from None
    except ValueError as error:
        raise _BadValue(f'"arguments" are a string that is not valid JSON: {error}') from error
    if _skip_space(text, end) != len(text):
        raise _BadValue('"arguments" are a string with text after its JSON')
    return value


def _problem(text: str, begin: int, call_id: str, detail: str) -> CallProblem:
    match = _NAME.match(text, begin)
    # What the model wrote goes back to it and into the record; a lone surrogate could do neither.
    name = match[1].encode("utf-8", "replace").decode() if match else ""
    which = f"the call of {name}" if name else "the call"
    detail = detail.encode("utf-8", "replace").decode()[:_MAX_DETAIL_CHARS]
    return CallProblem(call_id=call_id, name=name, message=f"error: {which} cannot be read: {detail}")


def _skip_space(text: str, position: int) -> int:
    match = _WHITE_SPACE.match(text, position)
    return match.end() if match else position


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _BadValue("a key is given twice")
    return value


def _finite(literal: str) -> float:
    number = float(literal)
    if number in (float("inf"), float("-inf")):
        raise _BadValue("a number is too large")
    return number


def _refuse_constant(literal: str) -> NoReturn:
    raise _BadValue(f"{literal} is no JSON value")


_DECODER = json.JSONDecoder(
    strict=False,  # control characters inside strings
    object_pairs_hook=_unique_pairs,
    parse_float=_finite,
    parse_constant=_refuse_constant,
)
