"""The first-bugs suite: small Python modules, each with one injected bug and real pytest tests."""

from examples.first_bugs.demonstrations import Demonstration, demonstrations
from examples.first_bugs.suite import KINDS, Draw, generate_suite

__all__ = ["KINDS", "Demonstration", "Draw", "demonstrations", "generate_suite"]
