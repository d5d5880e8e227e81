"""The schema. Every table carries the service's prefix, so that services may share a database."""

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

_ID = 64
_INSTANCE = 200  # a replica's name

# The replicas of this service. A row is a replica's claim to be alive: what it owns is its own as long as the
# row is there, and its beats go on.
replicas = Table(
    "rollout_replicas",
    metadata,
    Column("instance", String(_INSTANCE), primary_key=True),
    Column("life", String(_ID), nullable=False),  # one process; a restart keeps its name and has another life
    Column("num_beats", BigInteger, nullable=False),
    Column("joined_at", UtcDateTime, nullable=False),
)

suites = Table(
    "rollout_suites",
    metadata,
    Column("suite_id", String(_ID), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("version", String(200), nullable=False),
    Column("body_digest", String(64), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("name", "version"),
    Index("ix_rollout_suites_created_at_suite_id", "created_at", "suite_id"),
)

tasks = Table(
    "rollout_tasks",
    metadata,
    Column("task_id", String(_ID), primary_key=True),
    Column("suite_id", String(_ID), ForeignKey("rollout_suites.suite_id"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("name", String(300), nullable=False),
    Column("split", String(16), nullable=False),
    Column("instruction", Text, nullable=False),
    Column("tools", JsonText, nullable=False),
    Column("tags", JsonText, nullable=False),
    Column("session_wall_s", Float, nullable=False),
    Column("spec", LargeBinary, nullable=False),
    Column("reference", LargeBinary),
    Column("state", String(16), nullable=False),
    Column("reasons", JsonText, nullable=False),
    Column("owner", String(_INSTANCE)),  # the replica that has it checked; NULL = none yet
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("suite_id", "name"),
    Index("ix_rollout_tasks_suite_id_split_state", "suite_id", "split", "state"),
    Index("ix_rollout_tasks_created_at_task_id", "created_at", "task_id"),
    Index("ix_rollout_tasks_state", "state"),
    Index("ix_rollout_tasks_name", "name"),
)

# The suite that a run was bound to when its first group was asked for: a newer version of the suite
# must not change what a run in progress samples.
runs = Table(
    "rollout_runs",
    metadata,
    Column("run_id", String(_ID), primary_key=True),
    Column("suite_id", String(_ID), ForeignKey("rollout_suites.suite_id"), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

groups = Table(
    "rollout_groups",
    metadata,
    Column("group_id", String(_ID), primary_key=True),
    Column("run_id", String(_ID), ForeignKey("rollout_runs.run_id"), nullable=False),
    Column("group_index", BigInteger, nullable=False),
    Column("task_id", String(_ID), ForeignKey("rollout_tasks.task_id"), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("run_id", "group_index"),
)

evaluations = Table(
    "rollout_evaluations",
    metadata,
    Column("evaluation_id", String(_ID), primary_key=True),
    Column("suite_id", String(_ID), ForeignKey("rollout_suites.suite_id"), nullable=False),
    Column("request", JsonText, nullable=False),
    Column("state", String(16), nullable=False),
    Column("weight_version", Integer),
    # Summed over the replicas that played it, and of the one that took longest.
    Column("busy_slot_seconds", Float),
    Column("available_slot_seconds", Float),
    Column("created_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Index("ix_rollout_evaluations_state", "state"),
)

demonstrations = Table(
    "rollout_demonstrations",
    metadata,
    Column("demonstration_id", String(_ID), primary_key=True),
    Column("run_id", String(_ID), nullable=False),
    Column("state", String(16), nullable=False),
    # The scripts as compressed JSON, by position of the episode: a restart takes them up again.
    Column("scripts", LargeBinary, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Index("ix_rollout_demonstrations_state", "state"),
)

episodes = Table(
    "rollout_episodes",
    metadata,
    Column("episode_id", String(_ID), primary_key=True),
    Column("task_id", String(_ID), ForeignKey("rollout_tasks.task_id"), nullable=False),
    Column("run_id", String(_ID), nullable=False),  # empty for an evaluation
    Column("group_id", String(_ID), nullable=False),
    Column("group_index", BigInteger, nullable=False),
    Column("group_size", Integer, nullable=False),
    Column("evaluation_id", String(_ID), ForeignKey("rollout_evaluations.evaluation_id")),
    Column("demonstration_id", String(_ID), ForeignKey("rollout_demonstrations.demonstration_id")),
    Column("position", Integer, nullable=False),  # in its group, evaluation or demonstration
    Column("owner", String(_INSTANCE)),  # the replica that plays it, or ended it; NULL = none plays it
    Column("attempt", Integer, nullable=False),  # 0 = not begun
    Column("state", String(16), nullable=False),
    Column("outcome", String(16)),
    Column("reward", Float),
    Column("grade", LargeBinary),
    Column("error", Text, nullable=False),
    # True while the trainer has not been sent an ended episode that needs no grading.
    Column("is_owed", Boolean, nullable=False),
    Column("num_turns", Integer, nullable=False),
    Column("num_sampled_tokens", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Index("ix_rollout_episodes_run_id_state", "run_id", "state"),
    Index("ix_rollout_episodes_group_id", "group_id"),
    Index("ix_rollout_episodes_evaluation_id_state", "evaluation_id", "state"),
    Index("ix_rollout_episodes_demonstration_id_state", "demonstration_id", "state"),
    Index("ix_rollout_episodes_is_owed_updated_at", "is_owed", "updated_at"),
    Index("ix_rollout_episodes_state_updated_at", "state", "updated_at"),
    Index("ix_rollout_episodes_created_at_episode_id", "created_at", "episode_id"),
)

trajectories = Table(
    "rollout_trajectories",
    metadata,
    Column("trajectory_id", String(80), primary_key=True),
    Column("episode_id", String(_ID), ForeignKey("rollout_episodes.episode_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("trajectory", LargeBinary, nullable=False),  # a serialised `Trajectory`, without its grade
    Column("diff", LargeBinary, nullable=False),  # a serialised `WorkspaceDiff`
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("episode_id", "attempt"),
)

idempotency = Table(
    "rollout_idempotency",
    metadata,
    Column("key", String(200), primary_key=True),
    Column("route", String(64), primary_key=True),
    Column("body_digest", String(64), nullable=False),
    Column("response_json", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

# What the engines serve: what the staleness rule counts from, on every replica.
serving = Table(
    "rollout_serving",
    metadata,
    Column("only_row", Boolean, primary_key=True),
    Column("run_id", String(_ID), nullable=False),
    Column("weight_version", Integer, nullable=False),
    Column("label", String(64), nullable=False),
    Column("path", Text, nullable=False),
    Column("manifest_sha256", String(64), nullable=False),
    Column("is_proven", Boolean, nullable=False),  # compared with its publisher's probes
    Column("fence", BigInteger, nullable=False),  # of the lease under which it was served; only grows
)

# Who may change the weights on the engines. `fence` counts its holders, `num_loads` the loads they began.
weights_lease = Table(
    "rollout_weights_lease",
    metadata,
    Column("only_row", Boolean, primary_key=True),
    Column("holder", String(_INSTANCE), nullable=False),  # empty = free
    Column("fence", BigInteger, nullable=False),
    Column("num_loads", BigInteger, nullable=False),
)

# Every load of weights on an engine, stored before the engine is touched. Its label is the engine's name for
# these weights and is used once: whoever meets it on a token finds here whether the token may be data.
weight_loads = Table(
    "rollout_weight_loads",
    metadata,
    Column("label", String(64), primary_key=True),
    Column("load_id", BigInteger, nullable=False),
    Column("engine_url", String(500), nullable=False),
    Column("run_id", String(_ID), nullable=False),
    Column("weight_version", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("manifest_sha256", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Index("ix_rollout_weight_loads_state", "state"),
    Index("ix_rollout_weight_loads_load_id", "load_id"),
    Index("ix_rollout_weight_loads_run_id_weight_version", "run_id", "weight_version"),
)
