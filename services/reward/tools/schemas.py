"""The tools as the policy sees them. Short texts: the policy pays for every token."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolName(StrEnum):
    """Every tool there is."""

    READ_FILE = "read_file"
    WRITE_FILE = "write_file"
    EDIT_FILE = "edit_file"
    LIST_FILES = "list_files"
    BASH = "bash"
    RUN_TESTS = "run_tests"
    FINISH = "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """One tool: a line for the policy and the JSON schema of its arguments."""

    name: ToolName
    description: str
    arguments: tuple[str, ...]  # all of them required texts

    def parameters(self) -> dict[str, Any]:
        """The JSON schema."""
        return {
            "type": "object",
            "properties": {name: {"type": "string"} for name in self.arguments},
            "required": list(self.arguments),
            "additionalProperties": False,
        }


TOOLS: tuple[ToolSchema, ...] = (
    ToolSchema(name=ToolName.READ_FILE, description="Show a file.", arguments=("path",)),
    ToolSchema(
        name=ToolName.WRITE_FILE, description="Create or replace a file.", arguments=("path", "content")
    ),
    ToolSchema(
        name=ToolName.EDIT_FILE,
        description="Replace the only occurrence of a text in a file.",
        arguments=("path", "old", "new"),
    ),
    ToolSchema(name=ToolName.LIST_FILES, description="List the files.", arguments=()),
    ToolSchema(name=ToolName.BASH, description="Run a bash command.", arguments=("command",)),
    ToolSchema(name=ToolName.RUN_TESTS, description="Run the tests.", arguments=()),
    ToolSchema(name=ToolName.FINISH, description="Say that the task is done.", arguments=()),
)

SCHEMAS = {tool.name: tool for tool in TOOLS}
