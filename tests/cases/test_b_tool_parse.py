"""Cases B: tool calls as models write them, by id."""

import json
import time

import pytest

from services.rollout.chat import CallProblem, Message, ParsedTurn, Role, ToolRequest, unknown_tool_message
from services.rollout.chat.hermes import HermesFormat
from services.rollout.chat.tool_calls import parse_turn
from tests.fixtures.chat_models import QWEN25, build_chat, reference_text


def parse(text: str, *, is_cut: bool = False) -> ParsedTurn:
    return parse_turn(text, HermesFormat(), is_cut=is_cut)


def only_call(text: str) -> ToolRequest:
    (item,) = parse(text).items
    assert isinstance(item, ToolRequest), item
    return item


def only_problem(text: str) -> CallProblem:
    (item,) = parse(text).items
    assert isinstance(item, CallProblem), item
    return item


def test_B01_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    call = only_call('<tool_call>{"name":"bash","arguments":{"cmd":"echo </tool_call> test"}}</tool_call>')
    assert (call.name, call.arguments) == ("bash", {"cmd": "echo </tool_call> test"})


def test_B02_raw_line_ends_inside_strings_are_accepted() -> None:
    call = only_call('<tool_call>{"name":"edit","arguments":{"content":"line1\nline2\tend"}}</tool_call>')
    assert call.arguments == {"content": "line1\nline2\tend"}


def test_B03_unescaped_quotes_run_nothing_and_name_the_call() -> None:
    problem = only_problem(
        '<tool_call>{"name":"edit","arguments":{"content":"He said "hello" to me"}}</tool_call>'
    )
    assert problem.name == "edit"
    assert "edit" in problem.message
    assert "not valid" in problem.message


def test_B09_call_drafted_in_thinking_does_not_run() -> None:
    turn = parse(
        '<think>maybe <tool_call>{"name":"A","arguments":{}}</tool_call></think>\n'
        '<tool_call>{"name":"A","arguments":{}}</tool_call>'
    )
    assert [call.name for call in turn.calls] == ["A"]
    assert turn.problems == ()
    assert turn.thinking.startswith("maybe")


def test_B10_call_in_unclosed_thinking_runs_nothing_and_says_so() -> None:
    text = '<think>I should check. <tool_call>{"name":"A","arguments":{}}</tool_call>'
    turn = parse(text)
    assert turn.calls == ()
    assert "thinking block was not closed" in turn.problems[0].message
    # The same where the generation prompt opened the block.
    opened = parse_turn(text.removeprefix("<think>"), HermesFormat(), thinking_open=True)
    assert opened.calls == ()
    assert "thinking block was not closed" in opened.problems[0].message


def test_B11_unknown_tool_is_kept_and_the_answer_lists_the_tools() -> None:
    call = only_call('<tool_call>{"name":"Read","arguments":{"p":"a"}}</tool_call>')
    assert call.name == "Read"
    message = unknown_tool_message(call.name, ["View"])
    assert "'Read'" in message
    assert "View" in message


def test_B16_several_calls_keep_their_order_and_get_distinct_ids() -> None:
    turn = parse(
        '<tool_call>{"name":"a","arguments":{}}</tool_call>\n'
        '<tool_call>{"name":"b","arguments":{"k":1}}</tool_call>'
    )
    assert [(call.name, call.arguments) for call in turn.calls] == [("a", {}), ("b", {"k": 1})]
    assert len({call.call_id for call in turn.calls}) == 2


def test_B17_unicode_escapes_are_read_and_not_written_again() -> None:
    call = only_call('<tool_call>{"name":"t","arguments":{"city":"\\u5317\\u4eac"}}</tool_call>')
    assert call.arguments == {"city": "北京"}
    assert call.arguments_json == '{"city": "北京"}'


def test_B19_tools_are_rendered_in_given_order_without_html_escapes() -> None:
    tool = {
        "name": "g",
        "description": "user's x < 50 & y",
        "parameters": {"pattern": "a", "include": "b"},
    }
    chat = build_chat(QWEN25)
    text = reference_text(chat.open([Message(role=Role.USER, content="hello")], [tool]))
    assert (
        '{"name": "g", "description": "user\'s x < 50 & y", "parameters": {"pattern": "a", "include": "b"}}'
    ) in text


def test_B20_plain_brackets_are_no_calls() -> None:
    turn = parse('see [1] and {x}. <tool_call>{"name":"a","arguments":{}}</tool_call>')
    assert [call.name for call in turn.calls] == ["a"]
    assert turn.text == "see [1] and {x}."


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name":"f","arguments":{"x":NaN}}', None),
        ('{"name":"f","arguments":{"x":1e999}}', None),
        ('{"name":"f","arguments":{"a":1,"a":2}}', None),
        ('{"name":"f","arguments":"{\\"a\\": 1}"}', {"a": 1}),
        ('{"name":"f"}', {}),
        ('{"name":"f","arguments":[1]}', None),
        ('{"name":7,"arguments":{}}', None),
        ('{"name":"f","arguments":{"x":"\\ud800"}}', None),
        ('[{"name":"f","arguments":{}}]', None),
        ('{"name":"f","arguments":' + "[" * 100_000, None),
        ('{"name":"f","arguments":{"x":' + "9" * 10_000 + "}}", None),
        ('{"name":"f","arguments":null}', None),
        ("", None),
    ],
)
def test_B21_edge_values_give_a_call_or_a_problem(body: str, arguments: dict[str, object] | None) -> None:
    (item,) = parse(f"<tool_call>{body}</tool_call>").items
    if arguments is None:
        assert isinstance(item, CallProblem)
        assert item.message.startswith("error: ")
        assert len(item.message) < 300
    else:
        assert isinstance(item, ToolRequest)
        assert item.arguments == arguments
        assert json.loads(item.arguments_json) == arguments


def test_B21_nesting_at_any_depth_gives_a_call_or_a_problem() -> None:
    for depth in range(50, 2000, 25):
        body = '{"name":"f","arguments":{"x":' + "[" * depth + "]" * depth + "}}"
        (item,) = parse(f"<tool_call>{body}</tool_call>").items
        assert depth < 500 or isinstance(item, ToolRequest | CallProblem)
        assert depth > 500 or isinstance(item, ToolRequest)


def test_B22_cut_call_never_runs() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "unterminated'
    assert parse(text, is_cut=True).items == ()
    # An engine that reports a clean stop for the same text changes nothing.
    assert "cut off" in only_problem(text).message
    # A complete call in a turn that was cut later does not run either.
    complete = '<tool_call>{"name": "f", "arguments": {}}</tool_call> and then'
    assert parse(complete, is_cut=True).calls == ()


def test_B_reading_is_linear_in_the_text() -> None:
    for unit in (
        "<tool_call>",
        "</think>",
        "<think></think>",
        '<tool_call>{"name":"f"}</tool_call>',
        '<think>{["',
    ):
        started = time.perf_counter()
        parse(unit * 50_000)
        assert time.perf_counter() - started < 5
