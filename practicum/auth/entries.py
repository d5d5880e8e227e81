"""The tokens file: what is kept of each caller's token.

    {"tokens": [{"name": "ci", "scopes": ["submit"], "sha256": "…", "expires_at": "2027-01-31T00:00:00Z"}]}

A token is never kept, only the SHA-256 of its secret. A slow, salted hash such as bcrypt protects
what people choose: it makes each guess dear. Our secrets are 256 random bits, which nobody guesses at
any speed, while every request would pay for the slowness, and a flood of wrong tokens would buy it
from us. Anything in the file that is not understood makes the whole file refused: a mistyped
`expires_at` must not become a token without an end.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from practicum.auth.scopes import Scope

SECRET_PREFIX = "practicum_"  # by which secret scanners find one that leaked
SECRET_BYTES = 32
SERVICES = "services"  # the name that logs show for the services' own secret
_Compare = Callable[[str, str], bool]


class TokenEntry(BaseModel):
    """One token: whose it is, what it may do, and the hash of its secret."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    # It goes into logs, so it holds no spaces, quotes or line ends.
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    expires_at: AwareDatetime | None = None  # None = never

    def is_over(self, now: datetime) -> bool:
        """Whether it has expired."""
        return self.expires_at is not None and self.expires_at <= now


def new_secret() -> str:
    """A secret that cannot be guessed; show it once and keep its hash."""
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def sha256_of(secret: str) -> str:
    """The hash that stands for a secret, hex. Any text has one, half characters included."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def find_entry(
    sha256: str, entries: Sequence[TokenEntry], compare: _Compare = hmac.compare_digest
) -> TokenEntry | None:
    """The entry with this hash, or None."""
    found = None
    for entry in entries:
        # Never left early: the time of an answer must not tell how far in the list a token stands.
        if compare(entry.sha256, sha256):
            found = entry
    return found


def parse_entries(content: bytes) -> tuple[TokenEntry, ...]:
    """The entries of a tokens file; `ValueError` names the entry that is wrong and never shows a value."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if (
        not isinstance(document, dict)
        or set(document) != {"tokens"}
        or not isinstance(document["tokens"], list)
    ):
        raise ValueError('must be an object with one field, "tokens", a list')
    entries = tuple(_entry(index, value) for index, value in enumerate(document["tokens"]))
    _require_unique([entry.name for entry in entries], "name")
    _require_unique([entry.sha256 for entry in entries], "sha256")
    return entries


def dump_entries(entries: Sequence[TokenEntry]) -> bytes:
    """A tokens file that holds `entries`."""
    tokens = [entry.model_dump(mode="json", exclude_none=True) for entry in entries]
    return json.dumps({"tokens": tokens}, indent=2).encode() + b"\n"


def _entry(index: int, value: object) -> TokenEntry:
    name = value.get("name") if isinstance(value, dict) else None
    where = f"tokens[{index}]" + (f" ({name[:64]!r})" if isinstance(name, str) else "")
    try:
        entry = TokenEntry.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "entry"
        raise ValueError(f"{where}: {field}: {first['msg']}") from None
    if entry.name == SERVICES:
        raise ValueError(f"{where}: name: {SERVICES!r} means the services' own secret; take another")
    if len(set(entry.scopes)) != len(entry.scopes):
        raise ValueError(f"{where}: scopes: one is named twice")
    return entry


def _require_unique(values: Sequence[str], field: str) -> None:
    for index, value in enumerate(values):
        first = values.index(value)
        if first != index:
            raise ValueError(f"tokens[{index}]: {field}: the same as that of tokens[{first}]")
