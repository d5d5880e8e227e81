"""Runs one tool call in a session and words the answer for the policy.

What the policy got wrong is text in the answer, never an exception; only a platform failure raises
(`SandboxError`). Arguments are checked here; paths are resolved inside the sandbox.
"""

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import assert_never

from services.reward.sandbox.base import FileRefused, Ran, Session, TestRun
from services.reward.tools.schemas import SCHEMAS, ToolName

MAX_SHOWN_FAILURES = 3
MAX_ARGUMENTS_CHARS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool answered."""

    output: str
    is_error: bool = False
    ends_episode: bool = False
    limit_hit: str = ""  # the limit that ended the call; empty for none
    seconds: float = 0.0


class BadCall(Exception):
    """The policy's call is malformed; the message is its answer."""


async def call_tool(
    session: Session, allowed: Collection[str], name: str, arguments_json: str, *, wall_s: float
) -> ToolResult:
    """The answer to one call. Raises `SandboxError` where the sandbox broke."""
    started_s = time.monotonic()
    try:
        tool, arguments = parse_call(allowed, name, arguments_json)
        result = await _run(session, tool, arguments, wall_s)
    except (BadCall, FileRefused) as refusal:
        result = ToolResult(output=f"error: {refusal}", is_error=True)
    return ToolResult(
        output=result.output,
        is_error=result.is_error,
        ends_episode=result.ends_episode,
        limit_hit=result.limit_hit,
        seconds=time.monotonic() - started_s,
    )


def parse_call(
    allowed: Collection[str], name: str, arguments_json: str
) -> tuple[ToolName, Mapping[str, str]]:
    """The tool and its arguments. Raises `BadCall` with what to write instead."""
    schema = next((tool for tool in SCHEMAS.values() if tool.name == name and name in allowed), None)
    if schema is None:
        raise BadCall(f"no tool {_shown(name)}; there are {', '.join(sorted(allowed))}")
    if len(arguments_json) > MAX_ARGUMENTS_CHARS:
        raise BadCall(f"the arguments of {name} are too long")
    try:
        arguments = json.loads(arguments_json or "{}")
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the arguments of {name} are no JSON object") from error
    if not isinstance(arguments, dict):
        raise BadCall(f"the arguments of {name} are no JSON object")
    for argument in schema.arguments:
        value = arguments.get(argument)
        if not isinstance(value, str):
            raise BadCall(f"{name} needs the text argument {argument}")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise BadCall(f"{argument} holds half a character (a lone surrogate)")
    unknown = sorted(set(arguments) - set(schema.arguments))
    if unknown:
        raise BadCall(f"{name} has no argument {_shown(unknown[0])}")
    return schema.name, arguments


async def _run(session: Session, tool: ToolName, arguments: Mapping[str, str], wall_s: float) -> ToolResult:
    match tool:
        case ToolName.READ_FILE:
            return ToolResult(output=await session.read_file(arguments["path"]))
        case ToolName.WRITE_FILE:
            await session.write_file(arguments["path"], arguments["content"].encode())
            return ToolResult(output=f"wrote {arguments['path']}")
        case ToolName.EDIT_FILE:
            return await _edit(session, arguments)
        case ToolName.LIST_FILES:
            return ToolResult(output="\n".join(await session.list_files()) or "no files")
        case ToolName.BASH:
            command = arguments["command"]
            if "\0" in command:
                raise BadCall("command holds a NUL character")
            ran = await session.run(["bash", "--noprofile", "--norc", "-c", command], wall_s=wall_s)
            return bash_answer(ran, wall_s)
        case ToolName.RUN_TESTS:
            return run_tests_answer(await session.run_tests(wall_s=wall_s), wall_s)
        case ToolName.FINISH:
            return ToolResult(output="done", ends_episode=True)
        case _:
            assert_never(tool)


async def _edit(session: Session, arguments: Mapping[str, str]) -> ToolResult:
    path, old, new = arguments["path"], arguments["old"], arguments["new"]
    if not old:
        raise BadCall("old is empty")
    if old == new:
        raise BadCall("old and new are the same")
    await session.edit_file(path, old.encode(), new.encode())
    return ToolResult(output=f"edited {path}")


def bash_answer(ran: Ran, wall_s: float) -> ToolResult:
    """The output, then the exit status where it is not 0 and the limit where one was hit."""
    notes = []
    limit_hit = ran.limit_hit or _memory_by_text(ran)
    if limit_hit == "wall":
        notes.append(f"[ended after {wall_s:g} s]")
    elif limit_hit:
        notes.append(f"[limit: {limit_hit}]")
    if ran.exit_status is None and not limit_hit:
        notes.append("[ended by a signal]")
    elif ran.exit_status:
        notes.append(f"[exit status {ran.exit_status}]")
    output = "\n".join(part for part in (ran.output.rstrip("\n"), *notes) if part)
    return ToolResult(output=output, is_error=bool(notes), limit_hit=limit_hit)


def _memory_by_text(ran: Ran) -> str:
    # the kernel refuses an allocation above RLIMIT_AS in silence; only the program's words tell
    refused = ("MemoryError", "Cannot allocate memory", "cannot allocate memory")
    return "memory" if ran.exit_status and any(text in ran.output for text in refused) else ""


def run_tests_answer(run: TestRun, wall_s: float) -> ToolResult:
    """`2 passed`, or `1 failed, 1 passed` and a line for each of the first failures."""
    if run.ran.limit_hit == "wall":
        return ToolResult(
            output=f"error: the tests ran longer than {wall_s:g} s", is_error=True, limit_hit="wall"
        )
    if run.ran.limit_hit:
        text = f"error: the tests hit the limit {run.ran.limit_hit}"
        return ToolResult(output=text, is_error=True, limit_hit=run.ran.limit_hit)
    if run.num_files == 0:
        return ToolResult(output="error: no test files", is_error=True)
    if run.ended is None:
        return ToolResult(output="error: the test process ended early", is_error=True)
    statuses = [record.status for record in run.records]
    num_errors = statuses.count("error")
    counts = {
        "failed": statuses.count("failed"),
        "error" if num_errors == 1 else "errors": num_errors,
        "passed": statuses.count("passed"),
        "skipped": statuses.count("skipped"),
    }
    lines = [", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no tests"]
    broken = [record for record in run.records if record.status in ("failed", "error")]
    for record in broken[:MAX_SHOWN_FAILURES]:
        lines.append(f"{record.test_id.split('::')[-1]}: {record.message}")
    return ToolResult(output="\n".join(lines))


def _shown(text: str) -> str:
    return text[:100].encode("utf-8", "backslashreplace").decode()
