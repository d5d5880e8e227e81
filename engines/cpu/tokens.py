"""Text to ids and back, and the ids that end a sequence.

Owns: the tokenizer of the model folder. A folder without tokenizer.json is served too: then text prompts are
refused and answers carry no text, only ids.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engines.cpu.config import read_stop_ids


class Tokens:
    """The tokenizer (None = the folder has none) and the end-of-sequence ids."""

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids

    @classmethod
    def of_folder(cls, folder: Path) -> "Tokens":
        """Read the tokenizer and the stop ids (of the configs and of the tokenizer) of a model folder."""
        eos_ids = read_stop_ids(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            return cls(None, eos_ids)
        tokenizer = Tokenizer.from_file(str(path))
        settings = folder / "tokenizer_config.json"
        if settings.exists():
            eos = json.loads(settings.read_text()).get("eos_token")
            name = eos.get("content") if isinstance(eos, dict) else eos
            found = tokenizer.token_to_id(name) if name else None
            eos_ids = eos_ids if found is None else eos_ids | {found}
        return cls(tokenizer, eos_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer adds. Raises ValueError without one."""
        if self._tokenizer is None:
            raise ValueError("the model folder has no tokenizer.json: send input_ids")
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text of ids with the special tokens, for stop strings."""
        return self.decode(ids, False)
