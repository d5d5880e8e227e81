"""What the reward service reads from its environment; `main` is the only reader."""

import socket
from functools import partial

from pydantic import Field

from practicum.instance import MAX_NAME_LENGTH, instance_name
from practicum.settings import ServiceSettings


class RewardSettings(ServiceSettings):
    """Settings of one reward process, from `PRACTICUM_*` and `PRACTICUM_REWARD_*` variables."""

    reward_instance: str = Field(
        default_factory=partial(instance_name, "reward"),
        min_length=1,
        max_length=MAX_NAME_LENGTH,
        description="This replica's name: one of its own for every process, the same after a restart.",
    )
    reward_advertise: str = Field(
        default="",
        description="host:port at which callers reach this replica's gRPC, for the sessions that it opens. "
        "Empty: the machine's name, or the address that is bound.",
    )
    reward_grading_concurrency: int = Field(
        default=4, ge=1, le=256, description="Gradings at a time, whoever asks for them."
    )
    reward_max_sessions: int = Field(default=128, ge=1, description="Sandbox sessions open at once.")
    reward_idle_timeout_s: float = Field(
        default=300.0, gt=0, description="A session that nobody used for this long is ended."
    )
    reward_session_wall_s: float = Field(default=900.0, gt=0, description="Default wall limit of a session.")
    reward_call_wall_s: float = Field(default=10.0, gt=0, description="Default wall limit of a tool call.")
    reward_cpu_s: float = Field(default=10.0, ge=1, description="Default CPU limit of a process.")
    reward_memory_bytes: int = Field(default=512 * 1024 * 1024, description="Default memory of a session.")
    reward_num_processes: int = Field(default=64, ge=1, description="Default processes of a session.")
    reward_file_size_bytes: int = Field(default=16 * 1024 * 1024, description="Default size of one file.")
    reward_output_bytes: int = Field(default=16 * 1024, description="Default output of a call that is kept.")

    @property
    def advertised(self) -> str:
        """Where the sessions of this replica are called; empty where its port is not known beforehand."""
        if self.reward_advertise or not self.rpc_port:
            return self.reward_advertise
        is_any = self.rpc_host in ("", "0.0.0.0", "::")
        return f"{socket.gethostname() if is_any else self.rpc_host}:{self.rpc_port}"
