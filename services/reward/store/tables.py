"""The reward service's tables. Owns the schema; the queries are in `grades`."""

from sqlalchemy import Column, Float, Index, MetaData, String, Table

from practicum.db.engine import JsonText, UtcDateTime, naming_convention

metadata = MetaData(naming_convention=naming_convention)

_ID = String(200)

grades = Table(
    "reward_grades",
    metadata,
    Column("trajectory_id", _ID, primary_key=True),
    Column("run_id", _ID, nullable=False),  # empty for an evaluation
    Column("task_id", _ID, nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("reward", Float, nullable=True),  # NULL = not graded, never 0
    Column("grade", JsonText, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Index("ix_reward_grades_created", "created_at", "trajectory_id"),
    Index("ix_reward_grades_run", "run_id", "created_at", "trajectory_id"),
)
