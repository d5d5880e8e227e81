"""Fixtures that every kind of test may use."""

import pytest

pytest_plugins = [
    "tests.fixtures.postgres",
    "tests.fixtures.redis",
    "tests.fixtures.reward",
    "tests.fixtures.sglang",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sglang-venv` names the environment of a real SGLang server (see infra/sglang)."""
    parser.addoption("--sglang-venv", default=None, help="run the tests that need a real SGLang server")
    parser.addoption(
        "--compose", action="store_true", help="run the tests that need a Docker engine, as root"
    )
