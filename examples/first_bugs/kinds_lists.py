"""Kinds about lists of numbers."""

from random import Random

from examples.first_bugs.kinds import Bug, Constants, Kind, integer, numbers


def _constant(rng: Random) -> Constants:
    return {"K": rng.randint(3, 60)}


def _few(rng: Random) -> Constants:
    return {"K": rng.randint(2, 4), "J": rng.randint(2, 60)}


def _near_constant(rng: Random, constants: Constants) -> tuple[list[int]]:
    middle = integer(constants, "K")
    return ([rng.choice([middle, rng.randint(middle - 9, middle + 9)]) for _ in range(rng.randint(1, 6))],)


KINDS = (
    Kind(
        name="count_over",
        module="lists",
        functions=("count_over", "how_many", "count_big"),
        source="""def $f($a):
    '''How many of $a are over $K.'''
    $n = 0
    for $i in $a:
        if $i > $K:
            $n += 1
    return $n
""",
        bugs=(
            Bug(name="boundary", right="> $K", buggy=">= $K"),
            Bug(name="wrong_step", right="+= 1", buggy="+= 2"),
            Bug(name="wrong_start", right="= 0", buggy="= 5"),
        ),
        inputs=_near_constant,
        constants=_constant,
    ),
    Kind(
        name="sum_multiples",
        module="lists",
        functions=("sum_multiples", "add_multiples", "total_of"),
        source="""def $f($a):
    '''Sum of those of $a that $K divides.'''
    $n = 0
    for $i in $a:
        if $i % $K == 0:
            $n += $i
    return $n
""",
        bugs=(
            Bug(name="flipped_test", right="% $K == 0", buggy="% $K != 0"),
            Bug(name="wrong_operator", right="+= $i", buggy="-= $i"),
            Bug(name="wrong_sign", right="return $n", buggy="return -$n"),
        ),
        inputs=lambda rng, k: ([i * rng.choice([1, integer(k, "K")]) for i in numbers(rng, 1, 20)],),
        constants=lambda rng: {"K": rng.randint(2, 30)},
    ),
    Kind(
        name="largest",
        module="lists",
        functions=("largest", "biggest", "peak"),
        source="""def $f($a):
    '''Largest of $a, or $K for none.'''
    $m = $K
    for $i in $a:
        if $m == $K or $i > $m:
            $m = $i
    return $m
""",
        bugs=(
            Bug(name="flipped_test", right="> $m", buggy="< $m"),
            Bug(name="wrong_operator", right=" or $i", buggy=" and $i"),
            Bug(name="wrong_sign", right="return $m", buggy="return -$m"),
        ),
        inputs=lambda rng, k: (numbers(rng, 100, 150, least=0),),
        constants=_constant,
    ),
    Kind(
        name="mean",
        module="lists",
        functions=("mean", "average", "middle"),
        source="""def $f($a):
    '''Mean of $a rounded down, or $K for none.'''
    if not $a:
        return $K
    return sum($a) // len($a)
""",
        bugs=(
            Bug(name="wrong_operator", right="// len", buggy="* len"),
            Bug(name="wrong_function", right="sum(", buggy="max("),
            Bug(name="wrong_sign", right="return $K", buggy="return -$K"),
        ),
        inputs=lambda rng, k: (numbers(rng, 1, 50, least=0),),
        constants=_constant,
    ),
    Kind(
        name="dedupe",
        module="lists",
        functions=("dedupe", "unique", "distinct"),
        source="""def $f($a):
    '''$a with each value once, in order.'''
    $r = []
    for $i in $a:
        if $i not in $r:
            $r.append($i)
    return $r
""",
        bugs=(
            Bug(name="flipped_test", right="if $i not in", buggy="if $i in"),
            Bug(name="wrong_order", right="append($i)", buggy="insert(0, $i)"),
            Bug(name="wrong_start", right="= []", buggy="= [0]"),
        ),
        inputs=lambda rng, _: (numbers(rng, 1, 5, least=3),),
        constants=lambda _: {},
    ),
    Kind(
        name="rotate",
        module="lists",
        functions=("rotate", "turn", "shift"),
        source="""def $f($a):
    '''$a rotated left by $K, then $J.'''
    return $a[$K:] + $a[:$K] + [$J]
""",
        bugs=(
            Bug(name="swapped", right="return $a[$K:]", buggy="return $a[:$K]"),
            Bug(name="wrong_sign", right="+ [$J]", buggy="+ [-$J]"),
        ),
        inputs=lambda rng, _: (numbers(rng, 1, 50, least=3),),
        constants=_few,
    ),
    Kind(
        name="chunk",
        module="lists",
        functions=("chunk", "parts", "batches"),
        source="""def $f($a):
    '''$a cut into parts of $K.'''
    $r = []
    for $i in range(0, len($a), $K):
        $r.append($a[$i:$i + $K])
    return $r
""",
        bugs=(
            Bug(name="off_by_one", right="range(0,", buggy="range(1,"),
            Bug(name="wrong_operator", right="+ $K", buggy="* $K"),
            Bug(name="wrong_step", right="len($a), $K", buggy="len($a), 1"),
        ),
        inputs=lambda rng, _: (numbers(rng, 1, 50, least=3),),
        constants=_few,
    ),
    Kind(
        name="second",
        module="lists",
        functions=("second", "runner_up", "second_best"),
        source="""def $f($a):
    '''Second largest of $a, times $K.'''
    $r = sorted($a)
    return $r[-2] * $K
""",
        bugs=(
            Bug(name="off_by_one", right="[-2]", buggy="[-1]"),
            Bug(name="wrong_operator", right="* $K", buggy="+ $K"),
            Bug(name="unsorted", right="sorted($a)", buggy="list($a)"),
        ),
        inputs=lambda rng, _: (numbers(rng, 1, 50, least=3),),
        constants=_constant,
    ),
)
