"""Decides whether the hidden tests can run apart from the code under test.

Apart means: the tests run in one sandbox, the policy's modules in another, and only plain data crosses. That
is possible where the tests do no more with an editable module than call its top-level functions. The decision
looks at the hidden tests and the pristine workspace only, so that no policy can choose the weaker way.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.reward.integrity.paths import is_editable
from services.reward.sandbox.base import File

# Imports of a test that neither touch files or processes nor look at source text.
_HARMLESS_MODULES = frozenset(
    {"pytest", "__future__", "typing", "enum", "dataclasses", "copy", "operator", "functools", "itertools"}
    | {"math", "cmath", "decimal", "fractions", "statistics", "random", "collections", "heapq", "bisect"}
    | {"datetime", "calendar", "string", "textwrap", "re", "json"}
)
_REACHING_NAMES = frozenset({"open", "exec", "eval", "compile", "__import__", "globals", "vars"})


class _NeedsOneProcess(Exception):
    """The tests do something that needs the code under test in their own process."""


@dataclass(slots=True)
class _Imports:
    """What a test file imports from editable modules."""

    functions: dict[str, tuple[str, str]] = field(default_factory=dict)  # local name -> module, function
    modules: dict[str, str] = field(default_factory=dict)  # local name -> module


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """How hidden tests run."""

    functions: dict[str, list[str]]  # module -> functions called across the link; empty = one process
    reason: str  # why one process is needed; empty where it is not


def decide(pristine: Sequence[File], tests: Sequence[File], editable: Sequence[str]) -> Separation:
    """Whether, and with which functions, the tests run apart."""
    try:
        hidden = {file.path for file in tests}
        functions = _functions([file for file in pristine if file.path not in hidden], editable)
        folders = {file.path.split("/")[0].removesuffix(".py") for file in [*pristine, *tests]}
        if any(file.path.split("/")[-1] == "conftest.py" for file in pristine):
            raise _NeedsOneProcess("the workspace has a conftest.py")
        used: dict[str, list[str]] = {module: sorted(names) for module, names in functions.items()}
        for file in tests:
            if file.path.endswith(".py"):
                _check_file(file, functions, folders)
    except _NeedsOneProcess as reason:
        return Separation(functions={}, reason=str(reason))
    except (SyntaxError, ValueError, RecursionError) as error:
        return Separation(functions={}, reason=f"a file cannot be parsed ({type(error).__name__})")
    if not used:
        return Separation(functions={}, reason="no editable module has a top-level function")
    return Separation(functions=used, reason="")


def _functions(pristine: Sequence[File], editable: Sequence[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in pristine:
        module = file.path.removesuffix(".py").replace("/", ".")
        if not file.path.endswith(".py") or not is_editable(file.path, editable):
            continue
        if module.split(".")[-1] == "__init__" or not all(part.isidentifier() for part in module.split(".")):
            raise _NeedsOneProcess(f"{file.path} is editable and no plain module")
        body = ast.parse(file.content).body
        found[module] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return found


def _check_file(file: File, functions: dict[str, set[str]], folders: set[str]) -> None:
    name = file.path.split("/")[-1]
    if not (name.startswith("test_") or name.endswith("_test.py")):
        raise _NeedsOneProcess(f"{file.path} is no test file")
    tree = ast.parse(file.content)
    imports = _imports(tree, functions, folders)
    allowed = _parameters_known(tree)
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own_names = defined - allowed  # a fixture's name is its value
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.name.startswith("test") or node.name in allowed):
            unknown = {arg.arg for arg in node.args.args} - allowed - {"self"}
            if unknown:
                raise _NeedsOneProcess(f"{node.name} takes the fixture {sorted(unknown)[0]}")
        if isinstance(node, ast.Name) and node.id in _REACHING_NAMES:
            raise _NeedsOneProcess(f"{file.path} uses {node.id}")
    _check_uses(tree, imports, own_names)


def _imports(tree: ast.Module, functions: dict[str, set[str]], folders: set[str]) -> _Imports:
    imports = _Imports()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or (module not in functions and not _harmless(module, folders)):
                raise _NeedsOneProcess(f"a test imports from {module or '.'}")
            for alias in node.names if module in functions else ():
                if alias.name not in functions[module]:
                    raise _NeedsOneProcess(
                        f"a test imports {module}.{alias.name}, which is no plain function"
                    )
                imports.functions[alias.asname or alias.name] = (module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in functions and (alias.asname or "." not in alias.name):
                    imports.modules[alias.asname or alias.name] = alias.name
                elif alias.name in functions or not _harmless(alias.name, folders):
                    raise _NeedsOneProcess(f"a test imports {alias.name}")
    return imports


def _harmless(module: str, folders: set[str]) -> bool:
    first = module.split(".")[0]
    return first in _HARMLESS_MODULES and first not in folders


def _parameters_known(tree: ast.Module) -> set[str]:
    """Names that parametrize or a fixture of the same file gives."""
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.parametrize") and node.args:
            names = node.args[0]
            elements = names.elts if isinstance(names, ast.List | ast.Tuple) else [names]
            for element in elements:
                if isinstance(element, ast.Constant) and isinstance(element.value, str):
                    known |= {part.strip() for part in element.value.split(",")}
        if isinstance(node, ast.FunctionDef) and any(
            "fixture" in ast.unparse(d) for d in node.decorator_list
        ):
            known.add(node.name)
    return known


def _check_uses(tree: ast.Module, imports: _Imports, own_names: set[str]) -> None:
    """Every use of an imported function must be a call, with nothing callable among its arguments."""
    called: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in imports.functions:
            called.add(id(function))
        elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            if function.value.id not in imports.modules:
                continue
            called.add(id(function.value))
        else:
            continue
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            for part in ast.walk(argument):
                named = isinstance(part, ast.Name) and part.id in own_names
                if isinstance(part, ast.Lambda) or named:
                    raise _NeedsOneProcess("a test passes a function to the code under test")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in called:
            if not (node.id in imports.functions or node.id in imports.modules):
                continue
            raise _NeedsOneProcess(f"a test uses {node.id} other than by calling it")
