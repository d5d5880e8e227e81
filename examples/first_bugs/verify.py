"""Runs a generated module in this process, to check the generator's own work.

Only for modules that this package wrote (loops over given ranges, no files, no imports): what a model writes
runs in a sandbox and never here. An exception is a result like any other, so that a crash counts as a wrong
answer.
"""

import warnings
from copy import deepcopy
from functools import lru_cache
from types import CodeType

from examples.first_bugs.kinds import Arguments


@lru_cache(maxsize=4096)
def _compiled(source: str) -> CodeType | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # wrong edits such as `(1, 2)(3)` warn
        try:
            return compile(source, "module", "exec")
        except SyntaxError:
            return None


def call(source: str, function: str, arguments: Arguments) -> object:
    """What the module's function returns, or the name of the exception it raises."""
    scope: dict[str, object] = {}
    module = _compiled(source)
    if module is None:
        return "raises SyntaxError"
    try:
        exec(module, scope)
        run = scope[function]
        assert callable(run)
        result: object = run(*deepcopy(arguments))
    except Exception as error:  # noqa: BLE001 - the generated code may raise anything
        return f"raises {type(error).__name__}"
    return result


def passes(source: str, tests: str) -> bool:
    """Whether a module passes a test file of this package, whose import line is dropped."""
    scope: dict[str, object] = {}
    module, checks = _compiled(source), _compiled(tests.split("\n", 1)[1])
    assert checks is not None
    if module is None:
        return False
    try:
        exec(module, scope)
        exec(checks, scope)
        for name, value in list(scope.items()):
            if name.startswith("test_") and callable(value):
                value()
    except Exception:  # noqa: BLE001 - the generated code may raise anything
        return False
    return True
