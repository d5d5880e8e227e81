"""The process under test: imports the policy's modules and answers calls with plain data.

It lives in a sandbox of its own, without the hidden tests, and is never believed: the other end decodes
plain values and nothing else. Whatever the policy's code does here, it can only choose what it answers.
"""

import builtins
import importlib
import os
import socket
import sys
from typing import Any

from . import frames, plain
from .files import WORK

_MUTABLE = (list, dict, set, bytearray)


def serve(link_fd: int) -> int:
    """Answers calls until the other end closes the link."""
    sys.path.insert(0, WORK)
    os.chdir(WORK)
    with socket.socket(fileno=link_fd) as link:
        while True:
            frame = frames.receive(link)
            if frame is None:
                return 0
            try:
                answer = _answer(frame[0])
            except plain.NotPlain as error:
                answer = {"fault": str(error)}
            frames.send(link, answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    args: list[Any] = plain.decode(request["args"])
    kwargs: dict[str, Any] = plain.decode(request["kwargs"])
    try:
        function = getattr(importlib.import_module(request["module"]), request["function"])
    except BaseException as error:  # noqa: BLE001 — the policy's module may raise anything
        return {"fault": f"{type(error).__name__}: {error}"[:400]}
    try:
        result = function(*args, **kwargs)
        same_as = next((n for n, arg in enumerate(args) if arg is result and type(arg) in _MUTABLE), -1)
        answer = {"same_as": same_as} if same_as >= 0 else {"value": plain.encode(result)}
    except plain.NotPlain:
        raise
    except BaseException as error:  # noqa: BLE001 — the policy's function may raise anything
        return _raised(error)
    changed_args = [plain.encode(arg) if type(arg) in _MUTABLE else None for arg in args]
    changed_kwargs = {name: plain.encode(arg) for name, arg in kwargs.items() if type(arg) in _MUTABLE}
    return {**answer, "args": changed_args, "kwargs": changed_kwargs}


def _raised(error: BaseException) -> dict[str, Any]:
    known = (kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    try:
        args = plain.encode(list(error.args))
    except plain.NotPlain:
        args = plain.encode([str(error)])
    return {"raised": next(known).__name__, "args": args, "shown": f"{type(error).__name__}: {error}"[:400]}
