"""Plain data across the process boundary."""

import datetime
import decimal
import enum
import fractions
import json
import math
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.sandbox.inside.plain import NotPlain, decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def round_trip(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({"a"}),
        1 + 2j,
        range(1, 9, 2),
        bytearray(b"\xff"),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.UTC),
        datetime.time(1, 2, 3),
        datetime.timedelta(days=-1, microseconds=1),
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
        math.inf,
        {("a", 1): [None]},
    ],
)
def test_common_types_come_back(value: object) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_iterators_come_back_as_iterators() -> None:
    for made in (map(str, [1, 2]), (str(n) for n in (1, 2)), iter(["1", "2"])):
        back = round_trip(made)
        assert next(back) == "1"
        assert list(back) == ["2"]


class Equal(int):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Colour(enum.IntEnum):
    """An enumeration."""

    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value", [Equal(0), Colour.RED, Pair(1, 2), OrderedDict(a=1), object(), len, [Equal(1)]]
)
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(NotPlain, match="is not plain data"):
        encode(value)


def test_depth_and_size_are_bounded() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(NotPlain):
        encode(deep)
    with pytest.raises(NotPlain):
        encode([0] * 300_000)


@pytest.mark.parametrize(
    "encoded", [{"t": "os"}, {"t": "date", "v": "x"}, {"t": "set", "v": [{"t": "list", "v": []}]}, []]
)
def test_nonsense_is_refused(encoded: object) -> None:
    with pytest.raises(NotPlain):
        decode(encoded)
