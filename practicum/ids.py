"""Ids: UUIDv7, so that they sort by the time they were made; a prefix says what they name."""

import uuid_utils


def new_id(prefix: str) -> str:
    """A new id such as `ep_0197f0c2…`, ordered by time within one process."""
    return f"{prefix}_{uuid_utils.uuid7().hex}"


def new_event_id() -> str:
    """A new UUIDv7 in its usual form, for envelopes."""
    return str(uuid_utils.uuid7())
