"""What the trainer service reads from its environment; `main` is the only reader."""

from pathlib import Path

from pydantic import Field

from practicum.settings import ServiceSettings


class TrainerSettings(ServiceSettings):
    """Settings of one trainer process, from `PRACTICUM_*` and `PRACTICUM_TRAINER_*` variables."""

    rollout_rpc: str = Field(
        default="", description="host:port of the rollout service; empty publishes nowhere."
    )
    trainer_instance: str = Field(
        default="trainer",
        min_length=1,
        description="The consumer name. Keep it over restarts: what was read and not trained is found by it.",
    )
    trainer_threads: int = Field(default=1, ge=1, description="Threads torch computes with.")
    trainer_keep_checkpoints: int = Field(
        default=3, ge=1, description="Newest checkpoints kept; those in use stay as well."
    )
    trainer_unusable_batches: int = Field(
        default=3, ge=1, description="Batches in a row without one usable trajectory after which a run fails."
    )
    trainer_attempts: int = Field(
        default=4,
        ge=1,
        description="Tries of a run from its last step before it fails; a committed step resets it.",
    )
    trainer_retry_s: float = Field(
        default=1.0, gt=0, description="First wait of every back-off; doubles up to 30 s."
    )
    trainer_checkpoint_patience_s: float = Field(
        default=300.0, gt=0, description="How long a step waits for a disk that refuses its checkpoint."
    )
    trainer_publish_timeout_s: float = Field(default=120.0, gt=0)
    trainer_publish_patience_s: float = Field(
        default=120.0, gt=0, description="How long a finished run waits for its last version to be served."
    )
    trainer_publish_tolerance: float | None = Field(
        default=None, gt=0, description="Largest logprob difference on a probe; by precision where not set."
    )
    trainer_reward_low: float = -10.0
    trainer_reward_high: float = 10.0

    @property
    def checkpoint_root(self) -> Path:
        """Where checkpoints lie."""
        return self.data_dir / "checkpoints"
