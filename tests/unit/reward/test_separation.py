"""When hidden tests may run apart from the code under test."""

import pytest

from services.reward.integrity.separation import decide
from tests.fixtures.reward import files

MODULE = "LIMIT = 3\n\ndef f(x):\n    return x\n\ndef g(x):\n    return x\n\nclass C:\n    pass\n"


def reason(test: str, workspace: dict[str, str] | None = None) -> str:
    return decide(files(workspace or {"m.py": MODULE}), files({"test_h.py": test}), ("m.py",)).reason


@pytest.mark.parametrize(
    "test",
    [
        "from m import f\n\ndef test_1():\n    assert f(1) == 1\n",
        "from m import f as h, g\n\ndef test_1():\n    assert h(g(1)) == 1\n",
        "import m\n\ndef test_1():\n    assert m.f(1) == 1\n",
        "import pytest\nfrom m import f\n\n@pytest.mark.parametrize(('a', 'b'), [(1, 1)])\ndef test_1(a, b):\n    assert f(a) == b\n",  # noqa: E501
        "import pytest\nfrom m import f\n\ndef test_1():\n    with pytest.raises(ValueError):\n        f(1)\n",  # noqa: E501
        "import pytest\nfrom m import f\n\n@pytest.fixture\ndef n():\n    return 1\n\ndef test_1(n):\n    assert f(n) == 1\n",  # noqa: E501
    ],
)
def test_calls_of_functions_run_apart(test: str) -> None:
    separation = decide(files({"m.py": MODULE}), files({"test_h.py": test}), ("m.py",))
    assert separation.reason == ""
    assert separation.functions == {"m": ["f", "g"]}


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("from m import LIMIT\n", "no plain function"),
        ("from m import C\n", "no plain function"),
        ("from m import *\n", "no plain function"),
        ("from m import f\ncheck = f\n", "other than by calling"),
        ("import m\nprint(m)\n", "other than by calling"),
        ("from m import f\n\ndef test_1():\n    f(lambda: 1)\n", "passes a function"),
        ("from m import f\n\ndef key(x):\n    return x\n\ndef test_1():\n    f(key)\n", "passes a function"),
        ("from m import f\n\ndef test_1(tmp_path):\n    f(1)\n", "fixture tmp_path"),
        ("from m import f\n\ndef test_1(capsys):\n    f(1)\n", "fixture capsys"),
        ("import os\nfrom m import f\n", "imports os"),
        ("import inspect\n", "imports inspect"),
        ("from m import f\nopen('m.py')\n", "uses open"),
        ("from other import x\n", "imports from other"),
        ("from m import (\n", "cannot be parsed"),
    ],
)
def test_anything_else_shares_a_process(test: str, why: str) -> None:
    assert why in reason(test)


def test_a_workspace_module_that_shadows_a_harmless_one_is_not_harmless() -> None:
    test = "import random\nfrom m import f\n\ndef test_1():\n    assert f(1) == 1\n"
    assert reason(test) == ""
    assert "imports random" in reason(test, {"m.py": MODULE, "random.py": "import m"})


def test_a_conftest_of_the_task_shares_a_process() -> None:
    test = "from m import f\n\ndef test_1():\n    assert f(1) == 1\n"
    assert "conftest" in reason(test, {"m.py": MODULE, "conftest.py": ""})
