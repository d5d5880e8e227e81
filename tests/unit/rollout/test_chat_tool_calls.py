"""Reading and writing tool calls."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.chat import CallProblem, ToolRequest
from services.rollout.chat.hermes import HermesFormat
from services.rollout.chat.tool_calls import parse_turn

_PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "f", "arguments": {"a": "b"}}',
        '{"name": "f"',
        '"',
        "{",
        "}",
        "[",
        "\\u12",
        "\\ud800",
        "NaN",
        "\n",
        "\ud800",
        "\x00",
        "1e999",
    ]
)
_WRITTEN = st.lists(st.one_of(_PIECES, st.text(max_size=5)), max_size=30).map("".join)
_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
    )
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(text=_WRITTEN, is_cut=st.booleans(), thinking_open=st.booleans())
def test_parse_turn_of_any_text_gives_a_result(text: str, is_cut: bool, thinking_open: bool) -> None:
    turn = parse_turn(text, HermesFormat(), is_cut=is_cut, thinking_open=thinking_open)
    ids = [item.call_id for item in turn.items]
    assert len(set(ids)) == len(ids)
    assert len(turn.problems) <= 1
    if is_cut:
        assert turn.items == ()
    for call in turn.calls:
        assert json.loads(call.arguments_json) == call.arguments
        call.arguments_json.encode()
    for problem in turn.problems:
        (problem.name + problem.message).encode()


@settings(deadline=None)
@given(
    name=st.text(min_size=1, max_size=20),
    arguments=st.dictionaries(st.text(), _JSON, max_size=4),
    prose=st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20),
)
def test_parse_turn_of_a_rendered_call_gives_it_back(
    name: str, arguments: dict[str, object], prose: str
) -> None:
    written = HermesFormat().render_call(name, arguments)
    (item,) = parse_turn(f"{prose}{written}", HermesFormat()).items
    assert isinstance(item, ToolRequest)
    assert (item.name, item.arguments) == (name, arguments)


def test_render_call_is_the_form_that_templates_write() -> None:
    assert HermesFormat().render_call("edit", {"path": "a.py", "new": 'x = "é"\n'}) == (
        '<tool_call>\n{"name": "edit", "arguments": {"path": "a.py", "new": "x = \\"é\\"\\n"}}\n</tool_call>'
    )


def test_parse_turn_after_a_malformed_call_runs_nothing_more() -> None:
    turn = parse_turn(
        '<tool_call>{"name":"a"}</tool_call><tool_call>{"name":"b", "arguments": {"x": "bad " here '
        '</tool_call><tool_call>{"name":"rm"}</tool_call>"}}</tool_call>',
        HermesFormat(),
    )
    assert [call.name for call in turn.calls] == ["a"]
    assert [problem.name for problem in turn.problems] == ["b"]
    assert isinstance(turn.items[-1], CallProblem)
    bad_value = '<tool_call>{"name":"b", "arguments": [1]}</tool_call><tool_call>{"name":"c"}</tool_call>'
    assert parse_turn(bad_value, HermesFormat()).calls == ()


def test_parse_turn_of_a_call_without_its_closing_tag_is_a_problem() -> None:
    (problem,) = parse_turn('<tool_call>{"name":"a"}', HermesFormat()).problems
    assert "</tool_call> does not follow" in problem.message


def test_parse_turn_of_a_block_closed_but_never_opened_takes_all_before_as_thinking() -> None:
    turn = parse_turn(
        'let me try <tool_call>{"name":"a"}</tool_call></think>\nDone.<tool_call>{"name":"b"}</tool_call>',
        HermesFormat(),
    )
    assert [call.name for call in turn.calls] == ["b"]
    assert turn.thinking.startswith("let me try")
    assert turn.text == "Done."


def test_parse_turn_of_plain_prose_has_no_items() -> None:
    turn = parse_turn("  All tests pass.\n", HermesFormat())
    assert (turn.text, turn.thinking, turn.items) == ("All tests pass.", "", ())
