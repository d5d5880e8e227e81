"""The trainer's tables. Owns the schema; the queries belong to the stores.

The unique key on (run, episode) in `trainer_consumed` is what makes training exactly once: a step
that would train an episode again cannot commit.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from practicum.db.engine import JsonText, UtcDateTime, naming_convention

metadata = MetaData(naming_convention=naming_convention)

_ID = String(64)
_SHA256 = String(64)

runs = Table(
    "trainer_runs",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("name", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("error", Text, nullable=False),
    Column("spec_json", Text, nullable=False),
    Column("weight_version", Integer, nullable=False),  # -1 = not even the base weights are committed
    Column("published_version", Integer, nullable=True),
    Column("publish_error", Text, nullable=False),
    Column("groups_consumed", BigInteger, nullable=False),
    Column("batches_discarded", Integer, nullable=False),
    Column("duplicates_refused", Integer, nullable=False),
    Column("superseded_refused", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Index("ix_trainer_runs_state_created", "state", "created_at", "run_id"),
    Index("ix_trainer_runs_created", "created_at", "run_id"),
)

steps = Table(
    "trainer_steps",
    metadata,
    Column("run_id", _ID, ForeignKey(runs.c.run_id), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("metrics_json", JsonText, nullable=False),
    Column("publish_json", JsonText, nullable=True),  # NULL = not published, or overtaken by a newer version
    Column("committed_at", UtcDateTime, nullable=False),
)

consumed = Table(
    "trainer_consumed",
    metadata,
    Column("run_id", _ID, ForeignKey(runs.c.run_id), primary_key=True),
    Column("episode_id", String(128), primary_key=True),
    Column("trajectory_id", String(160), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("group_id", String(128), nullable=False),
    Column("task_id", String(256), nullable=False),
    Column("step", Integer, nullable=True),  # NULL = part of a batch that was discarded
    Column("trained", Boolean, nullable=False),  # False = filled a place, was never in a loss
    Column("reward", Float, nullable=True),  # NULL = not graded, never 0
    UniqueConstraint("run_id", "trajectory_id"),
    Index("ix_trainer_consumed_run_step", "run_id", "step"),
)

checkpoints = Table(
    "trainer_checkpoints",
    metadata,
    Column("checkpoint_id", _ID, primary_key=True),
    Column("run_id", _ID, ForeignKey(runs.c.run_id), nullable=False),
    Column("weight_version", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("manifest_sha256", _SHA256, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("retired_at", UtcDateTime, nullable=True),  # NULL = on disk
    UniqueConstraint("run_id", "weight_version"),
    Index("ix_trainer_checkpoints_created", "created_at", "checkpoint_id"),
)

quarantine = Table(
    "trainer_quarantine",
    metadata,
    Column("quarantine_id", _ID, primary_key=True),
    Column("run_id", _ID, ForeignKey(runs.c.run_id), nullable=False),
    Column("event_id", _ID, nullable=False),
    Column("trajectory_id", String(160), nullable=False),  # "" = could not be read
    Column("episode_id", String(128), nullable=False),
    Column("group_id", String(128), nullable=False),
    Column("reason", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("payload", LargeBinary, nullable=True),  # NULL = too large to keep
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("run_id", "event_id"),
    Index("ix_trainer_quarantine_run_created", "run_id", "created_at", "quarantine_id"),
    Index("ix_trainer_quarantine_trajectory", "trajectory_id"),
)

idempotency = Table(
    "trainer_idempotency",
    metadata,
    Column("key", String(200), primary_key=True),
    Column("body_digest", _SHA256, nullable=False),
    Column("run_id", _ID, nullable=False),  # the run that the first request made
    Column("created_at", UtcDateTime, nullable=False),
)
