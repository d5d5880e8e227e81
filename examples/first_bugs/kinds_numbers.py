"""Kinds about single numbers."""

from random import Random

from examples.first_bugs.kinds import Bug, Constants, Kind, integer


def _bounds(rng: Random) -> Constants:
    low = rng.randint(2, 40)
    return {"L": low, "H": low + rng.randint(5, 50)}


def _near_bounds(rng: Random, constants: Constants) -> tuple[int]:
    low, high = integer(constants, "L"), integer(constants, "H")
    return (
        rng.choice([low, high, low - rng.randint(1, 9), high + rng.randint(1, 9), rng.randint(low, high)]),
    )


def _near(rng: Random, constants: Constants) -> tuple[int]:
    middle = integer(constants, "K")
    return (rng.choice([middle, middle + rng.randint(-5, 5), rng.randint(0, 2 * middle)]),)


KINDS = (
    Kind(
        name="clamp",
        module="calc",
        functions=("clamp", "limit", "bound"),
        source="""def $f($x):
    '''$x kept within $L and $H.'''
    if $x < $L:
        return $L
    if $x > $H:
        return $H
    return $x
""",
        bugs=(
            Bug(name="flipped_test", right="< $L", buggy="> $L"),
            Bug(name="flipped_high", right="> $H", buggy="< $H"),
            Bug(name="wrong_sign", right="return $L", buggy="return -$L"),
        ),
        inputs=_near_bounds,
        constants=_bounds,
    ),
    Kind(
        name="in_range",
        module="calc",
        functions=("in_range", "within", "is_between"),
        source="""def $f($x):
    '''Is $x from $L to $H, both ends included?'''
    return $L <= $x and $x <= $H
""",
        bugs=(
            Bug(name="boundary_low", right="$L <=", buggy="$L <"),
            Bug(name="boundary_high", right="<= $H", buggy="< $H"),
            Bug(name="wrong_operator", right="and", buggy="or"),
        ),
        inputs=_near_bounds,
        constants=_bounds,
    ),
    Kind(
        name="grade",
        module="calc",
        functions=("grade", "rank", "rate"),
        source="""def $f($x):
    '''A for $x of at least $H, B from $L, else C.'''
    if $x >= $H:
        return 'A'
    return 'B' if $x >= $L else 'C'
""",
        bugs=(
            Bug(name="boundary", right=">= $H", buggy="> $H"),
            Bug(name="flipped_test", right=">= $L", buggy="<= $L"),
            Bug(name="wrong_result", right="else 'C'", buggy="else 'A'"),
        ),
        inputs=_near_bounds,
        constants=_bounds,
    ),
    Kind(
        name="price",
        module="calc",
        functions=("price", "cost", "bill"),
        source="""def $f($n):
    '''$n units at $K each, less $D from 10 units on.'''
    $t = $n * $K
    if $n >= 10:
        $t -= $D
    return $t
""",
        bugs=(
            Bug(name="wrong_operator", right="* $K", buggy="+ $K"),
            Bug(name="boundary", right=">= 10", buggy="> 10"),
            Bug(name="wrong_sign", right="-= $D", buggy="+= $D"),
        ),
        inputs=lambda rng, _: (rng.choice([10, rng.randint(0, 9), rng.randint(10, 30)]),),
        constants=lambda rng: {"K": rng.randint(11, 60), "D": rng.randint(2, 9)},
    ),
    Kind(
        name="tax",
        module="calc",
        functions=("tax", "fee", "duty"),
        source="""def $f($x):
    '''$K percent of what $x has above $L.'''
    if $x <= $L:
        return 0
    return ($x - $L) * $K // 100
""",
        bugs=(
            Bug(name="flipped_test", right="<= $L", buggy=">= $L"),
            Bug(name="wrong_operator", right="- $L", buggy="+ $L"),
            Bug(name="wrong_constant", right="// 100", buggy="// 10"),
        ),
        inputs=lambda rng, k: (rng.randint(0, 400),),
        constants=lambda rng: {"K": rng.randint(11, 60), "L": rng.randint(50, 150)},
    ),
    Kind(
        name="scale",
        module="calc",
        functions=("scale", "resize", "convert"),
        source="""def $f($x):
    '''$x of 0 to $L mapped to 0 to $H.'''
    return $x * $H // $L
""",
        bugs=(
            Bug(name="remainder", right="// $L", buggy="% $L"),
            Bug(name="wrong_operator", right="* $H", buggy="+ $H"),
        ),
        inputs=lambda rng, k: (rng.randint(1, integer(k, "L")),),
        constants=_bounds,
    ),
    Kind(
        name="sum_squares",
        module="calc",
        functions=("sum_squares", "square_sum", "squares"),
        source="""def $f($n):
    '''$K plus the squares of 1 to $n.'''
    $t = $K
    for $i in range(1, $n + 1):
        $t += $i * $i
    return $t
""",
        bugs=(
            Bug(name="off_by_one", right="range(1, $n + 1)", buggy="range(1, $n)"),
            Bug(name="wrong_operator", right="* $i", buggy="+ $i"),
            Bug(name="wrong_sign", right="= $K", buggy="= -$K"),
        ),
        inputs=lambda rng, _: (rng.randint(1, 9),),
        constants=lambda rng: {"K": rng.randint(2, 99)},
    ),
    Kind(
        name="power",
        module="calc",
        functions=("power", "grow", "compound"),
        source="""def $f($n):
    '''1 multiplied $n times by $K.'''
    $t = 1
    for $i in range($n):
        $t *= $K
    return $t
""",
        bugs=(
            Bug(name="wrong_operator", right="*= $K", buggy="+= $K"),
            Bug(name="off_by_one", right="range($n)", buggy="range($n - 1)"),
            Bug(name="wrong_start", right="= 1", buggy="= 0"),
        ),
        inputs=lambda rng, _: (rng.randint(0, 6),),
        constants=lambda rng: {"K": rng.randint(2, 30)},
    ),
    Kind(
        name="distance",
        module="calc",
        functions=("distance", "gap", "apart"),
        source="""def $f($a, $b):
    '''How far $a is from $b, at most $K.'''
    $d = abs($a - $b)
    return min($d, $K)
""",
        bugs=(
            Bug(name="wrong_operator", right="- $b", buggy="+ $b"),
            Bug(name="wrong_function", right="min(", buggy="max("),
        ),
        inputs=lambda rng, k: (rng.randint(0, 60), rng.randint(0, 60)),
        constants=lambda rng: {"K": rng.randint(5, 50)},
    ),
    Kind(
        name="sign",
        module="calc",
        functions=("sign", "compare", "side"),
        source="""def $f($x):
    '''1 for $x above $K, -1 below it, else 0.'''
    if $x > $K:
        return 1
    return -1 if $x < $K else 0
""",
        bugs=(
            Bug(name="boundary", right="> $K", buggy=">= $K"),
            Bug(name="wrong_sign", right="return 1", buggy="return 2"),
            Bug(name="boundary_low", right="< $K", buggy="<= $K"),
        ),
        inputs=_near,
        constants=lambda rng: {"K": rng.randint(11, 90)},
    ),
)
