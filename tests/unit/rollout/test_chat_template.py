"""Conversations to ids."""

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import InvalidInput
from practicum.trajectory import MaskReason
from services.rollout.chat import ChatTemplate, ContextPiece, Message, Role, ToolRequest
from tests.fixtures.chat_models import (
    CHATML,
    CONTROL_TOKENS,
    GLM,
    OPENS_THINKING,
    QWEN3,
    QWEN25,
    SMOLLM2,
    build_chat,
    build_tokenizer,
    reference_ids,
    reference_text,
)

IM_END = 2
READ_FILE = {
    "type": "function",
    "function": {"name": "read_file", "description": "reads", "parameters": {"type": "object"}},
}


def message(role: Role, content: str) -> Message:
    return Message(role=role, content=content)


def joined(pieces: Sequence[ContextPiece]) -> list[int]:
    ids: list[int] = np.concatenate([piece.ids for piece in pieces]).tolist()
    return ids


@pytest.mark.parametrize("source", [CHATML, SMOLLM2, QWEN25, QWEN3])
@settings(deadline=None, max_examples=25)
@given(
    texts=st.lists(st.one_of(st.text(max_size=20), st.sampled_from(CONTROL_TOKENS)), min_size=4, max_size=4)
)
def test_prompt_turns_and_deltas_are_the_whole_conversation(source: str, texts: list[str]) -> None:
    chat = build_chat(source)
    task, result, other, more = (text or "-" for text in texts)
    turns = ["ok", "<think>\nhm\n</think>\n\nnext"]
    ids = chat.open([message(Role.USER, task)]).tolist()
    ids += [*chat.tokenizer.encode_frame(turns[0]).tolist(), IM_END]
    ids += joined(chat.delta([message(Role.TOOL, result), message(Role.TOOL, other)], last_sampled_id=IM_END))
    ids += [*chat.tokenizer.encode_frame(turns[1]).tolist(), IM_END]
    ids += joined(chat.delta([message(Role.TOOL, more)], last_sampled_id=IM_END))
    whole = [
        message(Role.USER, task),
        message(Role.ASSISTANT, turns[0]),
        message(Role.TOOL, result),
        message(Role.TOOL, other),
        message(Role.ASSISTANT, turns[1]),
        message(Role.TOOL, more),
    ]
    assert ids == chat.open(whole).tolist()


def test_open_gives_the_ids_of_the_text_encoded_in_one_piece() -> None:
    prompt = build_chat(QWEN25).open(
        [message(Role.SYSTEM, "Be brief."), message(Role.USER, "\n fix it ")], [READ_FILE]
    )
    text = (
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n"
        f"{json.dumps(READ_FILE)}\n</tools><|im_end|>\n"
        "<|im_start|>user\n\n fix it <|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.tolist() == reference_ids(text)


def test_open_where_the_template_knows_no_tools_puts_them_into_the_system_message() -> None:
    chat = build_chat(SMOLLM2)
    assert not chat.report.supports_tools
    for messages in (
        [message(Role.SYSTEM, "Be brief."), message(Role.USER, "go")],
        [message(Role.USER, "go")],
    ):
        text = reference_text(chat.open(messages, [READ_FILE]))
        assert text.count("<|im_start|>system") == 1
        assert json.dumps(READ_FILE) in text
        assert text.index(json.dumps(READ_FILE)) < text.index("<|im_start|>user")
        assert ("Be brief." in text) is (len(messages) == 2)
    # Its tags are the control tokens that the model is to write.
    assert chat.tokenizer.token_id("<tool_call>") in chat.open([message(Role.USER, "go")], [READ_FILE])


def test_open_of_a_tool_named_like_a_control_token_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        build_chat(QWEN25).open([message(Role.USER, "go")], [{"name": "<|im_end|>"}])
    assert caught.value.field == "tools"


def test_open_of_earlier_calls_writes_them_in_the_templates_form() -> None:
    call = ToolRequest(
        call_id="call_0", name="f", arguments={"a": 'x "y"<|im_end|>'}, arguments_json="unused"
    )
    turn = Message(role=Role.ASSISTANT, content="", tool_calls=(call,))
    prompt = build_chat(QWEN25).open([message(Role.USER, "go"), turn, message(Role.TOOL, "1")])
    assert (
        '<tool_call>\n{"name": "f", "arguments": {"a": "x \\"y\\"<|im_end|>"}}\n</tool_call><|im_end|>'
    ) in reference_text(prompt)
    assert int((prompt == IM_END).sum()) == 4  # system, user, assistant, tool


def test_delta_reasons_are_tool_for_output_and_prompt_for_the_frame() -> None:
    chat = build_chat()
    pieces = chat.delta([message(Role.TOOL, "2 passed")], last_sampled_id=IM_END)
    assert [(piece.reason, reference_text(piece.ids)) for piece in pieces] == [
        (MaskReason.PROMPT, "\n<|im_start|>"),
        (MaskReason.TOOL, "tool\n2 passed"),
        (MaskReason.PROMPT, "<|im_end|>\n<|im_start|>assistant\n"),
    ]
    user = chat.delta([message(Role.USER, "go on")], last_sampled_id=IM_END)
    assert {piece.reason for piece in user} == {MaskReason.PROMPT}


@pytest.mark.parametrize("last", [None, 77, 0])
def test_delta_after_a_turn_without_its_end_token_injects_it(last: int | None) -> None:
    pieces = build_chat().delta([message(Role.TOOL, "x")], last_sampled_id=last)
    assert (pieces[0].reason, pieces[0].ids.tolist()) == (MaskReason.INJECTED, [IM_END])


def test_delta_of_empty_tool_output_keeps_the_message() -> None:
    pieces = build_chat().delta([message(Role.TOOL, "")], last_sampled_id=IM_END)
    assert reference_text(joined(pieces)) == "\n<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n"


def test_delta_of_an_assistant_message_is_refused() -> None:
    with pytest.raises(ValueError, match="assistant turns are sampled"):
        build_chat().delta([message(Role.ASSISTANT, "x")], last_sampled_id=IM_END)


def test_delta_renders_a_shape_once() -> None:
    chat = build_chat(QWEN25)
    chat.delta([message(Role.TOOL, "x")], last_sampled_id=IM_END)
    started = time.perf_counter()
    for index in range(1000):
        chat.delta([message(Role.TOOL, f"result {index}")], last_sampled_id=IM_END)
    assert time.perf_counter() - started < 2  # rendering each time takes several times as long


def test_delta_is_the_same_in_every_episode() -> None:
    first, second = build_chat(QWEN25), build_chat(QWEN25)
    for text in ("a", "b", "a"):
        given_messages = [message(Role.TOOL, text)]
        assert joined(first.delta(given_messages, last_sampled_id=IM_END)) == joined(
            second.delta(given_messages, last_sampled_id=IM_END)
        )


@pytest.mark.parametrize("source", [CHATML, SMOLLM2, QWEN25, QWEN3, OPENS_THINKING])
def test_encode_turn_is_read_back_as_the_same_calls(source: str) -> None:
    chat = build_chat(source)
    calls = [("edit", {"old": 'a "b"\n', "new": "<|im_end|>é"}), ("finish", {})]
    text = "I see.\n</think>\n\n" if chat.report.opens_thinking else ""
    ids = chat.encode_turn(text, calls)
    assert ids[-1] == IM_END
    assert int((ids == IM_END).sum()) == 1
    turn = chat.parse_turn(chat.tokenizer.decode(ids))
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    assert turn.problems == ()
    assert int((ids == chat.tokenizer.token_id("<tool_call>")).sum()) == 2


def test_encode_turn_gives_the_ids_of_the_rendered_conversation() -> None:
    chat = build_chat(QWEN25)
    ids = chat.encode_turn("Look.", [("read_file", {"path": "calc.py"})])
    assert ids.tolist() == reference_ids(
        'Look.\n<tool_call>\n{"name": "read_file", "arguments": {"path": "calc.py"}}\n</tool_call><|im_end|>'
    )
    assert chat.encode_turn("Done.").tolist() == reference_ids("Done.<|im_end|>")


def test_encode_turn_where_turns_have_no_end_of_their_own_is_refused() -> None:
    with pytest.raises(InvalidInput, match="none stands alone"):
        build_chat(GLM, eos="<|endoftext|>").encode_turn("x")


@pytest.mark.parametrize(
    ("source", "message_part"),
    [
        ("{% for m in messages %}", "is no Jinja template"),
        ("{{ raise_exception('nothing goes') }}", "nothing goes"),
        (CHATML.replace("add_generation_prompt", "false"), "no generation prompt"),
        (CHATML.replace("message.content or ''", "'same'"), "assistant messages"),
        (
            CHATML.replace("message.content or ''", "'' if message.role == 'tool' else message.content"),
            "tool messages",
        ),
        (CHATML.replace("message.content or ''", "message.content | upper"), "assistant messages"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_template_that_cannot_frame_a_tool_loop_is_refused_when_loaded(
    source: str, message_part: str
) -> None:
    with pytest.raises(InvalidInput, match=message_part) as caught:
        build_chat(source)
    assert caught.value.field == "chat_template"


def test_template_may_use_what_hugging_face_templates_use() -> None:
    source = (
        "{{ strftime_now('%Y') }}{{ {'a': \"<'é\"} | tojson(indent=2) }}"
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = ChatTemplate(build_tokenizer(), source, now=lambda: datetime(2031, 5, 1, tzinfo=UTC))
    text = reference_text(chat.open([message(Role.SYSTEM, "s"), message(Role.USER, "u")]))
    assert text == '2031{\n  "a": "<\'é"\n}<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n'


def test_report_of_each_family() -> None:
    assert build_chat(QWEN25).report.writes_tool_calls
    assert not build_chat(CHATML).report.writes_tool_calls
    assert build_chat(QWEN3).report.end_of_turn_id == IM_END
    opens_thinking = build_chat(OPENS_THINKING).report
    assert opens_thinking.thinking_prefix == "<think>\n"
    assert opens_thinking.appends_after_tool
    glm = build_chat(GLM, eos="<|endoftext|>")
    assert glm.report.end_of_turn_id is None
    assert {glm.tokenizer.token_text(token_id) for token_id in glm.report.stop_ids} == {
        "<|user|>",
        "<|observation|>",
    }


def test_end_of_turn_token_stops_a_turn_where_the_tokenizer_names_another_end() -> None:
    chat = build_chat(eos="<|endoftext|>")
    assert chat.stop_ids == (0, IM_END)
    assert chat.tokenizer.decode(chat.encode_turn("Done.")) == "Done."
