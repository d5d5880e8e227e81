"""The rollout service's settings, from `PRACTICUM_*` variables; read by `main` alone."""

from functools import partial
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from practicum.instance import MAX_NAME_LENGTH, instance_name
from practicum.settings import ServiceSettings


class RolloutSettings(ServiceSettings):
    """What an operator may set."""

    rollout_instance: str = Field(
        default_factory=partial(instance_name, "rollout"),
        min_length=1,
        max_length=MAX_NAME_LENGTH,
        description="This replica's name: one of its own for every process, the same after a restart.",
    )
    beat_interval_s: float = Field(default=3, gt=0, description="How often a replica says that it lives.")
    lost_after_s: float = Field(
        default=15,
        gt=0,
        description="A replica that says nothing for longer loses what it plays to the others.",
    )
    reward_rpc: str = Field(default="127.0.0.1:50052", description="host:port of the reward service's gRPC.")
    trainer_rpc: str = Field(default="127.0.0.1:50053", description="host:port of the trainer's gRPC.")
    engine_urls: str = Field(
        default="http://127.0.0.1:30000", description="Base URLs of the engines, separated by commas."
    )
    model_path: Path = Field(
        default=Path("var/models/tiny"),
        description="Folder with tokenizer, chat template and config.json of the model the engines serve.",
    )
    engine_slots: int = Field(
        default=64, ge=1, description="Requests one engine takes of this replica at once."
    )
    max_episodes: int = Field(default=96, ge=1, description="Episodes in flight at this replica at once.")
    admissions_at_once: int = Field(default=4, ge=1, description="Tasks checked at once.")
    episode_wall_s: float = Field(
        default=300,
        gt=0,
        description="Seconds of generation and tools an episode may use, unless its task says.",
    )
    turn_timeout_s: float = Field(default=120, gt=0, description="Deadline of one engine call.")
    tool_timeout_s: float = Field(default=120, gt=0, description="Deadline of one tool call.")
    attempt_deadline_s: float = Field(
        default=600, gt=0, description="An attempt that takes longer is a platform failure."
    )
    max_failures: int = Field(default=3, ge=1, description="Platform failures an episode may meet.")
    poll_interval_s: float = Field(
        default=0.5, gt=0, description="How often the trainer is asked for its runs."
    )
    heal_after_s: float = Field(
        default=15,
        gt=0,
        description="A run whose weights the engines lack for longer has its checkpoint loaded.",
    )
    regrade_after_s: float = Field(
        default=60, gt=0, description="An episode without a grade for longer is sent to grading again."
    )
    stalled_after_s: float = Field(
        default=120, gt=0, description="A run without progress for longer has its last groups sent again."
    )

    @field_validator("engine_urls")
    @classmethod
    def _urls(cls, text: str) -> str:
        urls = [url.strip() for url in text.split(",") if url.strip()]
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError("needs at least one URL that begins with http:// or https://")
        return ",".join(urls)

    @model_validator(mode="after")
    def _is_patient(self) -> Self:
        if self.lost_after_s < 3 * self.beat_interval_s:
            raise ValueError("PRACTICUM_LOST_AFTER_S must be at least 3 times PRACTICUM_BEAT_INTERVAL_S")
        return self
