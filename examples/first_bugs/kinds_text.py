"""Kinds about text."""

from random import Random

from examples.first_bugs.kinds import Bug, Constants, Kind, integer, phrase, words


def _mark(rng: Random) -> Constants:
    return {"S": rng.choice(["-", "/", ".", "_", "*"]), "K": rng.randint(4, 12)}


def _text(rng: Random, _constants: Constants) -> tuple[str]:
    return (phrase(rng, 9),)


def _around_length(rng: Random, constants: Constants) -> tuple[str]:
    length = integer(constants, "K")
    return ("".join(rng.choice("abcde") for _ in range(rng.choice([length, rng.randint(0, length + 6)]))),)


KINDS = (
    Kind(
        name="palindrome",
        module="text",
        functions=("palindrome", "is_mirror", "same_back"),
        source="""def $f($s):
    '''Does $s read the same backwards, in any case?'''
    $t = $s.lower()
    return $t == $t[::-1]
""",
        bugs=(
            Bug(name="wrong_step", right="[::-1]", buggy="[::2]"),
            Bug(name="wrong_operator", right="==", buggy="!="),
            Bug(name="wrong_function", right="lower()", buggy="strip()"),
        ),
        inputs=lambda rng, _: ((half := phrase(rng, 4)) + rng.choice(["", half[::-1].lower(), half[::-1]]),),
        constants=lambda _: {},
    ),
    Kind(
        name="count_vowels",
        module="text",
        functions=("count_vowels", "vowels", "num_vowels"),
        source="""def $f($s):
    '''$K plus the number of vowels in $s.'''
    $n = $K
    for $c in $s.lower():
        if $c in 'aeiou':
            $n += 1
    return $n
""",
        bugs=(
            Bug(name="flipped_test", right="if $c in", buggy="if $c not in"),
            Bug(name="wrong_step", right="+= 1", buggy="-= 1"),
            Bug(name="wrong_function", right="lower()", buggy="upper()"),
        ),
        inputs=_text,
        constants=_mark,
    ),
    Kind(
        name="shorten",
        module="text",
        functions=("shorten", "cut", "trim"),
        source="""def $f($s):
    '''$s, or its first $K letters and $S if longer.'''
    if len($s) <= $K:
        return $s
    return $s[:$K] + '$S'
""",
        bugs=(
            Bug(name="boundary", right="<= $K", buggy="< $K"),
            Bug(name="wrong_end", right="[:$K]", buggy="[$K:]"),
            Bug(name="wrong_operator", right="+ '$S'", buggy="- '$S'"),
        ),
        inputs=_around_length,
        constants=_mark,
    ),
    Kind(
        name="capital",
        module="text",
        functions=("capital", "title", "proper"),
        source="""def $f($s, $t):
    '''$s with a capital first letter, then $t small.'''
    return $s[:1].upper() + $s[1:] + $t.lower()
""",
        bugs=(
            Bug(name="wrong_function", right="upper()", buggy="strip()"),
            Bug(name="off_by_one", right="[1:]", buggy="[2:]"),
            Bug(name="wrong_case", right="lower()", buggy="title()"),
        ),
        inputs=lambda rng, _: (phrase(rng, 6), phrase(rng, 6)),
        constants=lambda _: {},
    ),
    Kind(
        name="join_words",
        module="text",
        functions=("join_words", "glue", "link"),
        source="""def $f($a):
    '''Words of $a with $S between, no empty ones.'''
    $r = [$w for $w in $a if $w != '']
    return '$S'.join($r)
""",
        bugs=(
            Bug(name="wrong_method", right="join(", buggy="split("),
            Bug(name="flipped_test", right="!= ''", buggy="== ''"),
            Bug(name="wrong_order", right="join($r)", buggy="join($r[::-1])"),
        ),
        inputs=lambda rng, _: (words(rng, least=2),),
        constants=_mark,
    ),
    Kind(
        name="pad",
        module="text",
        functions=("pad", "fill_left", "widen"),
        source="""def $f($s):
    '''$s filled with $S on the left to $K letters.'''
    $n = $K - len($s)
    return '$S' * $n + $s
""",
        bugs=(
            Bug(name="wrong_operator", right="- len", buggy="+ len"),
            Bug(name="wrong_repeat", right="* $n", buggy="+ $n"),
            Bug(name="wrong_function", right="len(", buggy="int("),
        ),
        inputs=_around_length,
        constants=_mark,
    ),
    Kind(
        name="count_letter",
        module="text",
        functions=("count_letter", "tally", "occurs"),
        source="""def $f($s, $c):
    '''How often $c is in $s, at most $K.'''
    $n = $s.count($c)
    return min($n, $K)
""",
        bugs=(
            Bug(name="wrong_function", right="min(", buggy="max("),
            Bug(name="wrong_method", right="count(", buggy="find("),
        ),
        inputs=lambda rng, k: ("a" * rng.randint(0, 14) + phrase(rng, 4), rng.choice("aBc")),
        constants=_mark,
    ),
    Kind(
        name="first_word",
        module="text",
        functions=("first_word", "head", "lead"),
        source="""def $f($s):
    '''Text of $s before its first $S, in small letters.'''
    $a = $s.split('$S')
    return $a[0].lower()
""",
        bugs=(
            Bug(name="off_by_one", right="[0]", buggy="[-1]"),
            Bug(name="wrong_function", right="lower()", buggy="upper()"),
            Bug(name="wrong_method", right="split(", buggy="strip("),
        ),
        inputs=lambda rng, k: (str(k["S"]).join(phrase(rng, 4) for _ in range(rng.randint(1, 3))),),
        constants=_mark,
    ),
)
