"""Idempotent creation: what a repeated `Idempotency-Key` means.

A service keeps one record a key in its own schema, written in the transaction that creates the
thing. The same key with the same body replays the stored answer; another body is the caller's
mistake (422); a key whose first request is still running is a conflict (409).
"""

import hashlib
from dataclasses import dataclass

import orjson
from pydantic import BaseModel

from practicum.errors import Conflict, InvalidInput

MAX_KEY_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """What a service stores about a key."""

    key: str
    body_digest: str
    response_json: str | None  # None = the first request is still running


def body_digest(body: BaseModel) -> str:
    """SHA-256 of a request body in a canonical form, hex."""
    return hashlib.sha256(orjson.dumps(body.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)).hexdigest()


def check_key(key: str | None) -> str | None:
    """The key, or `InvalidInput` where it cannot be stored."""
    if key is not None and not 0 < len(key) <= MAX_KEY_LENGTH:
        raise InvalidInput("Idempotency-Key", f"give 1 to {MAX_KEY_LENGTH} characters")
    return key


def replay(record: IdempotencyRecord, digest: str) -> str:
    """The stored answer for a repeated request."""
    if record.body_digest != digest:
        raise InvalidInput("Idempotency-Key", "this key was used with another body; use a new key")
    if record.response_json is None:
        raise Conflict("the first request with this Idempotency-Key is still running; ask again")
    return record.response_json
