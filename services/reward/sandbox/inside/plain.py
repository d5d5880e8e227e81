"""Plain data as JSON: how values cross between the process of the tests and the process under test.

Only exact built-in types pass. A subclass could carry its own `__eq__` or `__len__`, so it is refused by
name; what is decoded is always a fresh built-in value.
"""

import base64
import datetime
import decimal
import fractions
from typing import Any

MAX_DEPTH = 60
MAX_ITEMS = 200_000

_SCALARS = (type(None), bool, int, float, str)
_SEQUENCES: dict[Any, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_ITERATORS = {
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter("")),
    type(iter({})),
    type(iter(set())),
    type({}.items()),
    type({}.keys()),
    type({}.values()),
    type(_ for _ in ()),
    map,
    filter,
    zip,
    enumerate,
    reversed,
}
_TEXT_FORMS: dict[Any, str] = {
    datetime.date: "date",
    datetime.datetime: "datetime",
    datetime.time: "time",
    decimal.Decimal: "decimal",
    fractions.Fraction: "fraction",
}


class NotPlain(Exception):
    """A value is of a type that does not cross the process boundary."""


def encode(value: object) -> Any:
    """A JSON value for `value`. Raises `NotPlain` for any other type, depth or size."""
    return _encode(value, 0, [MAX_ITEMS])


def _encode(value: object, depth: int, room: list[int]) -> Any:
    kind = type(value)
    room[0] -= 1
    if depth > MAX_DEPTH or room[0] < 0:
        raise NotPlain("a value is nested too deeply or holds too many items")
    if kind in _SCALARS:
        return value
    if kind in _SEQUENCES:
        return {"t": _SEQUENCES[kind], "v": [_encode(item, depth + 1, room) for item in value]}  # type: ignore[attr-defined]
    if kind is dict:
        items = value.items()  # type: ignore[attr-defined]
        return {
            "t": "dict",
            "v": [[_encode(k, depth + 1, room), _encode(v, depth + 1, room)] for k, v in items],
        }
    return _encode_rare(value, kind, depth, room)


def _encode_rare(value: Any, kind: type, depth: int, room: list[int]) -> Any:
    if kind in (bytes, bytearray):
        return {"t": kind.__name__, "v": base64.b64encode(value).decode()}
    if kind is complex:
        return {"t": "complex", "v": [value.real, value.imag]}
    if kind is range:
        return {"t": "range", "v": [value.start, value.stop, value.step]}
    if kind is datetime.timedelta:
        return {"t": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if kind in _TEXT_FORMS:
        if kind in (datetime.datetime, datetime.time) and not _has_plain_zone(value):
            raise NotPlain("a time with a zone of its own type is not plain data")
        return {
            "t": _TEXT_FORMS[kind],
            "v": str(value) if kind is not datetime.datetime else value.isoformat(),
        }
    if kind in _ITERATORS:
        return {"t": "iterator", "v": [_encode(item, depth + 1, room) for item in value]}
    raise NotPlain(f"a value of type {kind.__module__}.{kind.__qualname__} is not plain data")


def _has_plain_zone(value: datetime.datetime | datetime.time) -> bool:
    return value.tzinfo is None or type(value.tzinfo) is datetime.timezone


def decode(encoded: Any) -> Any:
    """The value of an encoded one. Raises `NotPlain` for anything `encode` does not make."""
    try:
        return _decode(encoded, 0)
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise NotPlain(f"not an encoded value: {type(error).__name__}") from error


def _decode(encoded: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("an encoded value is nested too deeply")
    if type(encoded) in _SCALARS:
        return encoded
    kind, value = encoded["t"], encoded["v"]
    match kind:
        case "list":
            return [_decode(item, depth + 1) for item in value]
        case "tuple":
            return tuple(_decode(item, depth + 1) for item in value)
        case "set":
            return {_decode(item, depth + 1) for item in value}
        case "frozenset":
            return frozenset(_decode(item, depth + 1) for item in value)
        case "dict":
            return {_decode(k, depth + 1): _decode(v, depth + 1) for k, v in value}
        case "iterator":
            return iter([_decode(item, depth + 1) for item in value])
        case "bytes":
            return base64.b64decode(value)
        case "bytearray":
            return bytearray(base64.b64decode(value))
        case "complex":
            return complex(*value)
        case "range":
            return range(*value)
        case "timedelta":
            return datetime.timedelta(*value)
        case "date":
            return datetime.date.fromisoformat(value)
        case "datetime":
            return datetime.datetime.fromisoformat(value)
        case "time":
            return datetime.time.fromisoformat(value)
        case "decimal":
            return decimal.Decimal(value)
        case "fraction":
            return fractions.Fraction(value)
    raise NotPlain("an encoded value has an unknown type")
