"""Text to ids and back."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from practicum.errors import InvalidInput
from services.rollout.chat import ChatTemplate, ChatTokenizer
from tests.fixtures.chat_models import CHATML, CONTROL_TOKENS, build_tokenizer, tokenizer_definition

_TEXT = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*CONTROL_TOKENS, "<|im_", "end|>", "e\u0301", "\r\n"])),
    max_size=12,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(text=_TEXT)
def test_encode_text_of_any_text_holds_no_control_id_and_decodes_to_it(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode_text(text)
    assert ids.dtype == np.int32
    assert not set(ids.tolist()) & tokenizer.control_ids
    assert tokenizer.decode(ids) == text


def test_encode_text_of_a_lone_surrogate_replaces_it() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode_text("a\ud800b")) == "a\ufffdb"


def test_encode_text_keeps_unicode_that_the_tokenizer_would_normalise() -> None:
    definition = json.loads(tokenizer_definition())
    definition["normalizer"] = {"type": "NFC"}
    tokenizer = ChatTokenizer(definition=definition, special_tokens={})
    assert tokenizer.decode(tokenizer.encode_text("e\u0301")) == "e\u0301"
    assert tokenizer.decode(tokenizer.encode_frame("e\u0301")) == "\u00e9"


def test_encode_text_where_the_vocabulary_itself_spells_the_tag_still_avoids_it() -> None:
    vocab = {"<end>": 0, "<": 1, "end>": 2, "a": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    chat = ChatTokenizer(definition=json.loads(tokenizer.to_str()), special_tokens={"eos_token": "<end>"})
    assert chat.control_ids == {0}
    assert chat.encode_frame("a <end>").tolist() == [3, 0]
    assert chat.encode_text("a <end>").tolist() == [3, 1, 2]


def test_white_space_tokens_of_the_vocabulary_are_ordinary_text() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_definition())
    tokenizer.add_tokens(["        "])
    chat = ChatTokenizer(definition=json.loads(tokenizer.to_str()), special_tokens={})
    assert tokenizer.token_to_id("        ") not in chat.control_ids
    assert chat.decode(chat.encode_text("x        y<|im_end|>")) == "x        y<|im_end|>"


def test_split_frame_cuts_at_control_tokens() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.split_frame("<|im_start|>user\nx<|im_end|>\n") == [1, "user\nx", 2, "\n"]


def test_decode_drops_ids_that_end_a_turn_at_the_end_only() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode_frame("<think>a</think><|im_end|>")
    assert tokenizer.decode(ids) == "<think>a</think>"
    assert tokenizer.decode(tokenizer.encode_frame("a<|im_end|>b")) == "a<|im_end|>b"
    assert tokenizer.decode(np.empty(0, dtype=np.int32)) == ""


def write_folder(folder: Path, **files: object) -> Path:
    contents = {
        "tokenizer.json": json.loads(tokenizer_definition()),
        "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"},
        "config.json": {"vocab_size": 512, "eos_token_id": 2},
        "generation_config.json": {"eos_token_id": [2, 0]},
    }
    for name, content in {**contents, **files}.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def test_load_reads_a_hugging_face_folder(tmp_path: Path) -> None:
    chat = ChatTemplate.load(write_folder(tmp_path))
    tokenizer = chat.tokenizer
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (512, 2, 0, None)
    assert chat.stop_ids == (2, 0)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert len(tokenizer.fingerprint) == len(chat.fingerprint) == 64


def test_fingerprints_tell_vocabularies_and_templates_apart(tmp_path: Path) -> None:
    before = ChatTemplate.load(write_folder(tmp_path))
    changed = json.loads(tokenizer_definition())
    changed["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    changed["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    same = ChatTemplate.load(write_folder(tmp_path, **{"tokenizer.json": changed}))
    assert same.tokenizer.fingerprint == before.tokenizer.fingerprint
    changed["model"]["merges"].pop()
    other = ChatTemplate.load(write_folder(tmp_path, **{"tokenizer.json": changed}))
    assert other.tokenizer.fingerprint != before.tokenizer.fingerprint
    (tmp_path / "chat_template.jinja").write_text(CHATML + "{# changed #}")
    assert ChatTemplate.load(tmp_path).fingerprint != before.fingerprint


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer.json": None}, "tokenizer.json"),
        ({"tokenizer.json": {"model": {}}}, "tokenizer.json"),
        ({"tokenizer.json": []}, "tokenizer.json"),
        ({"config.json": []}, "config.json"),
    ],
)
def test_load_of_a_bad_folder_names_the_file(tmp_path: Path, files: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ChatTemplate.load(write_folder(tmp_path, **files))
    assert caught.value.field == named


def test_load_of_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    lossy = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(InvalidInput, match="byte for byte"):
        ChatTokenizer.load(write_folder(tmp_path, **{"tokenizer.json": json.loads(lossy.to_str())}))


def test_load_without_a_template_names_it(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidInput) as caught:
        ChatTemplate.load(tmp_path)
    assert caught.value.field == "chat_template.jinja"
