"""The sandbox as an episode sees it. The implementation talks to the reward service (`rpc/sandboxes.py`)."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from services.rollout.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a tool said."""

    output: str
    is_error: bool = False
    ends_episode: bool = False
    limit_hit: str = ""  # the limit the policy ran into; empty for none
    seconds: float = 0.0


class Sandbox(Protocol):
    """An open sandbox with the task's workspace in it."""

    async def call_tool(self, call_id: str, name: str, arguments_json: str) -> ToolAnswer:
        """Run a tool. Raises `PracticumError` where the platform failed; the policy's faults are answers."""
        ...

    async def snapshot(self) -> bytes:
        """What the policy changed: a serialised `WorkspaceDiff`, opaque here."""
        ...


class Sandboxes(Protocol):
    """Where sandboxes come from."""

    def open(self, session_id: str, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox that is closed, with everything in it, on leaving the context."""
        ...
