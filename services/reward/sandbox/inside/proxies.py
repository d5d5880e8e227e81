"""The process of the tests: modules that look like the policy's but call it across a link.

The hidden tests import these. No code of the policy ever runs here, so it cannot reach the assertions, the
results or the tests' text; a call gives plain data, a built-in exception, or `CandidateFault`.
"""

import builtins
import importlib.abc
import importlib.machinery
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from . import frames, plain

MAX_ANSWER_BYTES = 16 * 1024 * 1024


class CandidateFault(AssertionError):
    """The code under test ended its process, is broken, or answered something that is no plain data."""


class UnsupportedArgument(Exception):
    """A test passes something that cannot cross; says nothing about the policy."""


class Link:
    """Calls functions of the process under test, one at a time."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self.unsupported = ""  # the first argument that could not cross; pytest swallows the exception

    def close(self) -> None:
        """Ends the link, and with it the process under test."""
        self._socket.close()

    def call(self, module: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result, or its exception."""
        try:
            encoded_args, encoded_kwargs = plain.encode(list(args)), plain.encode(kwargs)
        except plain.NotPlain as error:
            self.unsupported = self.unsupported or f"{module}.{function}: {error}"
            raise UnsupportedArgument(self.unsupported) from error
        request = {"module": module, "function": function, "args": encoded_args, "kwargs": encoded_kwargs}
        try:
            frames.send(self._socket, request)
            frame = frames.receive(self._socket, MAX_ANSWER_BYTES)
        except (OSError, frames.FrameError) as error:
            raise CandidateFault(f"no answer from the code under test ({type(error).__name__})") from error
        if frame is None:
            raise CandidateFault("the code under test ended its process")
        return _accept(frame[0], args, kwargs)


def _accept(answer: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "raised" in answer:
        raise _exception(answer)
    if "fault" in answer:
        raise CandidateFault(str(answer["fault"])[:400])
    try:
        for arg, encoded in zip(args, answer["args"], strict=True):
            _take_over(arg, encoded)
        for name, encoded in answer["kwargs"].items():
            _take_over(kwargs[name], encoded)
        if "same_as" in answer:
            return args[answer["same_as"]]
        return plain.decode(answer["value"])
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, plain.NotPlain) as error:
        raise CandidateFault(f"the code under test answered nonsense ({error})") from error


def _take_over(arg: Any, encoded: Any) -> None:
    """Gives an argument the content it has on the other side, as a call in one process would."""
    if encoded is None or type(arg) not in (list, dict, set, bytearray):
        return
    value = plain.decode(encoded)
    if type(value) is not type(arg) or value == arg:
        return
    if isinstance(arg, list | bytearray):
        arg[:] = value
    else:
        arg.clear()
        arg.update(value)


def _exception(answer: dict[str, Any]) -> Exception:
    kind = getattr(builtins, str(answer["raised"]), None)
    shown = str(answer.get("shown"))[:400]
    # AssertionError and above-Exception kinds would steer pytest, so they arrive as a fault
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is AssertionError:
        return CandidateFault(shown)
    try:
        made: Exception = kind(*plain.decode(answer["args"]))
    except (TypeError, ValueError, KeyError, plain.NotPlain):
        return CandidateFault(shown)
    return made


class ProxyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the proxied modules before the path is searched."""

    def __init__(self, link: Link, functions: Mapping[str, Sequence[str]]) -> None:
        self._link = link
        self._functions = functions

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """A spec for a proxied module; None for any other."""
        if fullname in self._functions:
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fills a proxied module with its functions."""
        for name in self._functions[module.__name__]:
            setattr(module, name, self._function(module.__name__, name))

    def _function(self, module: str, name: str) -> Callable[..., Any]:
        def proxy(*args: Any, **kwargs: Any) -> Any:
            return self._link.call(module, name, args, kwargs)

        proxy.__name__ = proxy.__qualname__ = name
        return proxy


def install(link_fd: int, functions: Mapping[str, Sequence[str]]) -> Link:
    """Makes `import` give proxies for these modules, by module name the functions they have."""
    link = Link(link_fd)
    sys.meta_path.insert(0, ProxyFinder(link, functions))
    return link
