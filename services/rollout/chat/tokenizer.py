"""The tokenizer of a Hugging Face folder, on `tokenizers` alone.

Owns which ids are control ids and keeps text from outside away from them. Two encoders share one
vocabulary: the frame encoder knows the added tokens, the text encoder does not, so that the text
`<|im_end|>` in a tool's output is spelled out in ordinary tokens.

Invariants
- `encode_text` yields no control id, and `decode` of its ids gives the text back byte for byte.
  Unicode normalisation is left out of the text encoder for that reason.
- No encoder adds a BOS: the template's text already says whether there is one.
"""

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from practicum.errors import InvalidInput
from practicum.trajectory import Ids

# Every class of byte that UTF-8 has, white space in odd places, and text that looks like a tag.
_ROUND_TRIP_PROBE = (
    " a\t b\r\n\n  c\x00\x1f\x7f <x>e\u0301</x>\n\u00e9\u07ff\u0800\u5ba2\uffff\U0001f600"
    + "".join(map(chr, range(0x20, 0x7F)))
)

_SURROGATE = re.compile("[\ud800-\udfff]")


class ChatTokenizer:
    """Text to ids and back. Immutable after `load`; safe to share between episodes.

    Attributes: `vocab_size` (ids are below it: rows of the model's embedding where config.json says so),
    `eos_id`, `pad_id`, `bos_id` (None where the folder names none), `control_ids` (every id that outside text
    must never yield), `stop_ids` (ids that end a turn), `fingerprint` (SHA-256 of tokenizer.json without its
    truncation and padding), `special_tokens` ("eos_token" and the like to their text), `chat_template` (its
    source, "" where the folder has none).
    """

    def __init__(
        self,
        *,
        definition: dict[str, object],
        special_tokens: dict[str, str],
        chat_template: str = "",
        vocab_size: int | None = None,  # None = as many as the tokenizer has
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        meaning = {**definition, "truncation": None, "padding": None}
        self.fingerprint = hashlib.sha256(
            json.dumps(meaning, sort_keys=True, ensure_ascii=False).encode()
        ).hexdigest()
        self._frame_encoder = Tokenizer.from_str(json.dumps(meaning))
        self.vocab_size = vocab_size or self._frame_encoder.get_vocab_size(with_added_tokens=True)
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token")
        self.bos_id = self._special_id("bos_token")
        ends = stop_ids if self.eos_id is None else (self.eos_id, *stop_ids)
        self.stop_ids = tuple(dict.fromkeys(ends))

        # Runs of white space that some vocabularies add are ordinary text; any other added token is control.
        added = {
            index: token.content for index, token in self._frame_encoder.get_added_tokens_decoder().items()
        }
        self.control_ids = frozenset(index for index, content in added.items() if content.strip())
        self._control_ids_sorted = np.array(sorted(self.control_ids), dtype=np.int32)
        contents = sorted((added[index] for index in self.control_ids), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._text_encoder = _text_encoder(meaning, added)

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """Read a Hugging Face folder: tokenizer.json, and where present tokenizer_config.json,
        chat_template.jinja, config.json and generation_config.json.

        Raises `InvalidInput` naming the file that is missing, unreadable, or that defines a tokenizer which
        does not give text back byte for byte.
        """
        definition = _read_json(folder / "tokenizer.json", required=True)
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        special = {**_read_json(folder / "special_tokens_map.json"), **tokenizer_config}
        model_config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        try:
            tokenizer = cls(
                definition=definition,
                special_tokens=_special_tokens(special),
                chat_template=_template_source(folder, tokenizer_config),
                vocab_size=_vocab_size(model_config),
                stop_ids=(*_eos_ids(generation), *_eos_ids(model_config)),
            )
        except InvalidInput:
            raise
        # `tokenizers` raises a bare Exception for a definition that it cannot read.
        except Exception as error:
            raise InvalidInput("tokenizer.json", f"cannot be read: {error}") from error
        if tokenizer.decode(tokenizer.encode_text(_ROUND_TRIP_PROBE)) != _ROUND_TRIP_PROBE:
            raise InvalidInput(
                "tokenizer.json", "does not give text back byte for byte; a byte-level tokenizer is needed"
            )
        return tokenizer

    def with_stop_ids(self, stop_ids: Sequence[int]) -> "ChatTokenizer":
        """The same tokenizer with more ids that end a turn."""
        changed = copy.copy(self)
        changed.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *stop_ids)))
        return changed

    def encode_text(self, text: str) -> Ids:
        """Ids of text from outside: never a control id, and `decode` gives the text back.

        A lone surrogate, which UTF-8 cannot carry, becomes U+FFFD.
        """
        ids = self._spell(text)
        if self._has_control(ids):
            # The vocabulary itself holds the tag's text: spell it in two parts, so that neither is the tag.
            cuts = [match.start() + 1 for match in self._control_text.finditer(text)]
            parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            ids = np.concatenate([self._spell(part) for part in parts])
        if self._has_control(ids):
            raise ValueError("the tokenizer cannot spell this text without control tokens")
        return ids

    def encode_frame(self, text: str) -> Ids:
        """Ids of the platform's own text: control-token text becomes control ids; no BOS is added."""
        return np.array(self._frame_encoder.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def split_frame(self, text: str) -> list[int | str]:
        """The platform's own text cut at its control tokens: their ids, and the text between them."""
        encoding = self._frame_encoder.encode(text, add_special_tokens=False)
        parts: list[int | str] = []
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.control_ids:
                if start > position:
                    parts.append(text[position:start])
                parts.append(token_id)
                position = end
        if position < len(text):
            parts.append(text[position:])
        return parts

    def decode(self, ids: Ids) -> str:
        """The text of a turn: tags such as <tool_call> kept, the ids that end the turn dropped.

        Ids are decoded together, since a character may span several. A turn that stops inside a character
        ends in U+FFFD; the ids remain the truth.
        """
        end = len(ids)
        while end and int(ids[end - 1]) in self.stop_ids:
            end -= 1
        return self._frame_encoder.decode(ids[:end].tolist(), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of a token's text; None where the vocabulary lacks it."""
        return self._frame_encoder.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """The text of a control id, as the vocabulary spells it; "" for an unknown id."""
        return self._frame_encoder.id_to_token(token_id) or ""

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._frame_encoder.token_to_id(token)

    def _spell(self, text: str) -> Ids:
        sound = text if text.isascii() else _SURROGATE.sub("\ufffd", text)
        return np.array(self._text_encoder.encode(sound, add_special_tokens=False).ids, dtype=np.int32)

    def _has_control(self, ids: Ids) -> bool:
        return bool(np.isin(ids, self._control_ids_sorted).any())


def _text_encoder(definition: dict[str, object], added: dict[int, str]) -> Tokenizer:
    """The same vocabulary without control tokens and without Unicode normalisation."""
    spaces = {index: content for index, content in added.items() if not content.strip()}
    tokens = definition.get("added_tokens")
    kept = [token for token in tokens if token["id"] in spaces] if isinstance(tokens, list) else []
    plain = {**definition, "added_tokens": kept, "post_processor": None}
    if _only_normalises_unicode(definition.get("normalizer")):
        plain["normalizer"] = None
    encoder = Tokenizer.from_str(json.dumps(plain))
    if any(encoder.token_to_id(content) != index for index, content in spaces.items()):
        # Without the control tokens before them these would be numbered anew; ordinary pieces do as well.
        encoder = Tokenizer.from_str(json.dumps({**plain, "added_tokens": []}))
    return encoder


def _only_normalises_unicode(normalizer: object) -> bool:
    if not isinstance(normalizer, dict):
        return True
    if normalizer.get("type") == "Sequence":
        return all(_only_normalises_unicode(part) for part in normalizer.get("normalizers", []))
    return normalizer.get("type") in {"NFC", "NFD", "NFKC", "NFKD"}


def _read_json(path: Path, *, required: bool = False) -> dict[str, object]:
    if not path.is_file():
        if required:
            raise InvalidInput(path.name, f"there is no such file in {path.parent}")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(path.name, f"is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidInput(path.name, "is no JSON object")
    return content


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Names such as "eos_token" to their text, which files write as a string or as {"content": text}."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _template_source(folder: Path, tokenizer_config: dict[str, object]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, list):  # several named templates
        inline = next((entry["template"] for entry in inline if entry.get("name") == "default"), None)
    return inline if isinstance(inline, str) else ""


def _vocab_size(model_config: dict[str, object]) -> int | None:
    text_config = model_config.get("text_config")
    size = model_config.get("vocab_size") or (
        text_config.get("vocab_size") if isinstance(text_config, dict) else None
    )
    return size if isinstance(size, int) else None


def _eos_ids(config: dict[str, object]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(index for index in values if isinstance(index, int))
