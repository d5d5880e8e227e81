"""Kinds about dates and times."""

from random import Random

from examples.first_bugs.kinds import Bug, Constants, Kind, integer


def _separator(rng: Random) -> Constants:
    return {"S": rng.choice(["-", "/", ".", "_"])}


def _date(rng: Random, constants: Constants) -> tuple[str]:
    year, month, day = rng.randint(1950, 2050), rng.randint(1, 12), rng.randint(1, 28)
    return (str(constants["S"]).join((str(year), f"{month:02}", f"{day:02}")),)


def _year(rng: Random, constants: Constants) -> tuple[int]:
    start = integer(constants, "K")
    century = rng.choice([1600, 1700, 1800, 1900, 2000, 2100, 2200, 2400])
    return (
        rng.choice(
            [century, rng.randint(start, 2400), start + rng.randint(-9, 9), 4 * rng.randint(300, 600)]
        ),
    )


def _clock(rng: Random, _constants: Constants) -> tuple[str]:
    return (f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",)


KINDS = (
    Kind(
        name="parse_date",
        module="dates",
        functions=("parse_date", "read_date", "split_date"),
        source="""def $f($s):
    '''Year, month and day of $s, as in 2024$S05$S31.'''
    $a, $b, $c = $s.split('$S')
    return int($a), int($b), int($c)
""",
        bugs=(
            Bug(name="wrong_separator", right="split('$S')", buggy="split(':')"),
            Bug(name="wrong_method", right=".split", buggy=".strip"),
            Bug(name="wrong_function", right="return int", buggy="return abs"),
        ),
        inputs=_date,
        constants=_separator,
    ),
    Kind(
        name="leap_year",
        module="dates",
        functions=("is_leap", "leap_year", "has_leap_day"),
        source="""def $f($y):
    '''Is $y a leap year, from $K on?'''
    if $y < $K:
        return False
    return $y % 4 == 0 and ($y % 100 != 0 or $y % 400 == 0)
""",
        bugs=(
            Bug(name="wrong_operator", right="% 100 != 0", buggy="% 100 == 0"),
            Bug(name="wrong_constant", right="% 4 == 0", buggy="% 3 == 0"),
            Bug(name="flipped_test", right="< $K", buggy="> $K"),
        ),
        inputs=_year,
        constants=lambda rng: {"K": rng.randint(1500, 1899)},
    ),
    Kind(
        name="days_in_month",
        module="dates",
        functions=("days_in_month", "month_days", "month_length"),
        source="""def $f($m, $l):
    '''Days in month $m; $l tells a leap year.'''
    if $m == 2:
        return 29 if $l else 28
    return 30 if $m in (4, 6, 9, 11) else 31
""",
        bugs=(
            Bug(name="swapped", right="29 if $l else 28", buggy="28 if $l else 29"),
            Bug(name="wrong_constant", right="(4, 6,", buggy="(4, 5,"),
            Bug(name="off_by_one", right="== 2", buggy="== 3"),
        ),
        inputs=lambda rng, _: (rng.randint(1, 12), rng.random() < 0.5),
        constants=lambda _: {},
    ),
    Kind(
        name="weekday_after",
        module="dates",
        functions=("weekday_after", "later_day", "add_days"),
        source="""def $f($a, $b):
    '''Weekday 0 to 6, $b days after weekday $a.'''
    return ($a + $b) % 7
""",
        bugs=(
            Bug(name="wrong_operator", right="+ $b", buggy="- $b"),
            Bug(name="off_by_one", right="% 7", buggy="% 6"),
        ),
        inputs=lambda rng, _: (rng.randint(0, 6), rng.randint(0, 40)),
        constants=lambda _: {},
    ),
    Kind(
        name="minutes_of",
        module="dates",
        functions=("minutes_of", "to_minutes", "clock_minutes"),
        source="""def $f($s):
    '''Minutes of a clock text $s like 08:30, plus $K.'''
    $a, $b = $s.split(':')
    return int($a) * 60 + int($b) + $K
""",
        bugs=(
            Bug(name="wrong_constant", right="* 60", buggy="* 24"),
            Bug(name="wrong_operator", right="+ $K", buggy="- $K"),
            Bug(name="wrong_sign", right="+ int", buggy="- int"),
        ),
        inputs=_clock,
        constants=lambda rng: {"K": rng.randint(2, 99)},
    ),
    Kind(
        name="split_seconds",
        module="dates",
        functions=("split_seconds", "min_sec", "to_clock"),
        source="""def $f($x):
    '''Minutes and seconds of $x plus $K seconds.'''
    $t = $x + $K
    return $t // 60, $t % 60
""",
        bugs=(
            Bug(name="wrong_constant", right="// 60", buggy="// 24"),
            Bug(name="wrong_operator", right="+ $K", buggy="- $K"),
            Bug(name="flipped", right="% 60", buggy="* 60"),
        ),
        inputs=lambda rng, _: (rng.randint(100, 4000),),
        constants=lambda rng: {"K": rng.randint(2, 99)},
    ),
)
