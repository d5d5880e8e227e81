"""What a kind of function is: a source template, its possible bugs, and the inputs that tell them apart.

Owns the record types and the pool of identifier names. Templates write `$name` where an instance puts a name
or a constant. Never runs a function. Invariant: a bug's `right` fragment stands exactly once in the source,
and its `buggy` fragment exactly once after the injection; `suite.instantiate` draws again where names break
that.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

Constants = Mapping[str, int | str]
Arguments = tuple[object, ...]

# Short words only: the model copies them, and each is one token.
NAMES: tuple[str, ...] = (
    *("x", "y", "z", "n", "k", "v", "t", "u", "w", "p", "q", "d"),
    *("val", "num", "item", "row", "cell", "word", "part", "data", "box", "left", "out", "tmp"),
)

_PLACEHOLDER = re.compile(r"\$([A-Za-z]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One way to break a kind: `right` becomes `buggy`."""

    name: str
    right: str
    buggy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A family of functions that differ in names and constants."""

    name: str
    module: str  # file stem
    functions: tuple[str, ...]  # names the function may have
    source: str
    bugs: tuple[Bug, ...]
    inputs: Callable[[Random, Constants], Arguments]
    constants: Callable[[Random], Constants]


def fill(template: str, values: Mapping[str, int | str]) -> str:
    """The template with every `$name` replaced. Raises KeyError for a name without a value."""
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)


def placeholders(template: str) -> list[str]:
    """The names used in a template, each once, in order."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(template)))


def integer(constants: Constants, name: str) -> int:
    """A constant known to be a number."""
    return int(constants[name])


def numbers(rng: Random, low: int, high: int, least: int = 1) -> list[int]:
    """A short list of random integers."""
    return [rng.randint(low, high) for _ in range(rng.randint(least, 6))]


def words(rng: Random, least: int = 1) -> list[str]:
    """A short list of random words, some empty."""
    return [
        "".join(rng.choice("abeiotz") for _ in range(rng.randint(0, 4))) for _ in range(rng.randint(least, 5))
    ]


def phrase(rng: Random, longest: int) -> str:
    """Random letters of both cases."""
    return "".join(rng.choice("aBcDeIoUtZ") for _ in range(rng.randint(1, longest)))
