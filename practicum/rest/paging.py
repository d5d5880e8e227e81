"""Keyset pages: the token holds the sort key of the last row, so inserts never skip or repeat one."""

import base64
import binascii
import json
from datetime import datetime

from practicum.errors import InvalidInput

MAX_PAGE_SIZE = 200
DEFAULT_PAGE_SIZE = 50


def encode_page_token(created_at: datetime, row_id: str) -> str:
    """An opaque token for the page after the row with this key."""
    key = json.dumps([created_at.isoformat(), row_id])
    return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def decode_page_token(token: str) -> tuple[datetime, str]:
    """The key in a token; `InvalidInput` where it is not one of ours."""
    try:
        padded = token + "=" * (-len(token) % 4)
        created_at, row_id = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        moment = datetime.fromisoformat(created_at)
    except (binascii.Error, UnicodeDecodeError, ValueError, TypeError) as error:
        raise InvalidInput("page_token", "not a page token; use next_page_token of the last page") from error
    if not isinstance(row_id, str) or moment.tzinfo is None:
        raise InvalidInput("page_token", "not a page token; use next_page_token of the last page")
    return moment, row_id
