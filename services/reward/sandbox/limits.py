"""What a sandbox may use: defaults, the bounds a task may ask for, and where both are joined."""

from dataclasses import dataclass, fields, replace
from typing import Any

from practicum.errors import InvalidInput

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one session; all of them are always in force."""

    session_wall_s: float = 600.0
    call_wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MEBIBYTE
    num_processes: int = 64
    file_size_bytes: int = 16 * MEBIBYTE
    output_bytes: int = 16 * 1024

    @property
    def disk_bytes(self) -> int:
        """Size of each private file system; what lies there counts as memory."""
        return min(self.memory_bytes // 2, 256 * MEBIBYTE)


# The largest a task may ask for, and the smallest that lets a Python process start.
LARGEST = SandboxLimits(
    session_wall_s=4 * 3600.0,
    call_wall_s=900.0,
    cpu_s=900.0,
    memory_bytes=8192 * MEBIBYTE,
    num_processes=512,
    file_size_bytes=256 * MEBIBYTE,
    output_bytes=4 * MEBIBYTE,
)
SMALLEST = SandboxLimits(
    session_wall_s=0.1,
    call_wall_s=0.1,
    cpu_s=1.0,
    memory_bytes=128 * MEBIBYTE,
    num_processes=1,
    file_size_bytes=4096,
    output_bytes=256,
)


def limits_from(asked: Any, default: SandboxLimits) -> SandboxLimits:
    """The default with every non-zero value of `asked` (an object with the same field names) put in.

    Raises `InvalidInput` for a value outside the bounds.
    """
    changes: dict[str, Any] = {}
    for field in fields(SandboxLimits):
        value = getattr(asked, field.name)
        if not value:
            continue
        low, high = getattr(SMALLEST, field.name), getattr(LARGEST, field.name)
        if not low <= value <= high:
            raise InvalidInput(f"limits.{field.name}", f"{value} is not between {low} and {high}")
        changes[field.name] = value
    return replace(default, **changes)
