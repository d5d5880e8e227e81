"""The trainer's first schema"""

import sqlalchemy as sa
from alembic import op

from practicum.db.engine import JsonText, UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "trainer_idempotency",
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("body_digest", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_trainer_idempotency")),
    )
    op.create_table(
        "trainer_runs",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("weight_version", sa.Integer(), nullable=False),
        sa.Column("published_version", sa.Integer(), nullable=True),
        sa.Column("publish_error", sa.Text(), nullable=False),
        sa.Column("groups_consumed", sa.BigInteger(), nullable=False),
        sa.Column("batches_discarded", sa.Integer(), nullable=False),
        sa.Column("duplicates_refused", sa.Integer(), nullable=False),
        sa.Column("superseded_refused", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_trainer_runs")),
    )
    op.create_index("ix_trainer_runs_created", "trainer_runs", ["created_at", "run_id"])
    op.create_index("ix_trainer_runs_state_created", "trainer_runs", ["state", "created_at", "run_id"])

    op.create_table(
        "trainer_checkpoints",
        sa.Column("checkpoint_id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("weight_version", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("retired_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["trainer_runs.run_id"], name=op.f("fk_trainer_checkpoints_run_id")
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name=op.f("pk_trainer_checkpoints")),
        sa.UniqueConstraint(
            "run_id", "weight_version", name=op.f("uq_trainer_checkpoints_run_id_weight_version")
        ),
    )
    op.create_index("ix_trainer_checkpoints_created", "trainer_checkpoints", ["created_at", "checkpoint_id"])

    op.create_table(
        "trainer_consumed",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("episode_id", sa.String(length=128), nullable=False),
        sa.Column("trajectory_id", sa.String(length=160), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("group_id", sa.String(length=128), nullable=False),
        sa.Column("task_id", sa.String(length=256), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("trained", sa.Boolean(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["trainer_runs.run_id"], name=op.f("fk_trainer_consumed_run_id")),
        sa.PrimaryKeyConstraint("run_id", "episode_id", name=op.f("pk_trainer_consumed")),
        sa.UniqueConstraint("run_id", "trajectory_id", name=op.f("uq_trainer_consumed_run_id_trajectory_id")),
    )
    op.create_index("ix_trainer_consumed_run_step", "trainer_consumed", ["run_id", "step"])

    op.create_table(
        "trainer_quarantine",
        sa.Column("quarantine_id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("event_id", sa.String(length=64), nullable=False),
        sa.Column("trajectory_id", sa.String(length=160), nullable=False),
        sa.Column("episode_id", sa.String(length=128), nullable=False),
        sa.Column("group_id", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["trainer_runs.run_id"], name=op.f("fk_trainer_quarantine_run_id")
        ),
        sa.PrimaryKeyConstraint("quarantine_id", name=op.f("pk_trainer_quarantine")),
        sa.UniqueConstraint("run_id", "event_id", name=op.f("uq_trainer_quarantine_run_id_event_id")),
    )
    op.create_index(
        "ix_trainer_quarantine_run_created", "trainer_quarantine", ["run_id", "created_at", "quarantine_id"]
    )
    op.create_index("ix_trainer_quarantine_trajectory", "trainer_quarantine", ["trajectory_id"])

    op.create_table(
        "trainer_steps",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("metrics_json", JsonText(), nullable=False),
        sa.Column("publish_json", JsonText(), nullable=True),
        sa.Column("committed_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["trainer_runs.run_id"], name=op.f("fk_trainer_steps_run_id")),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_trainer_steps")),
    )


def downgrade() -> None:
    """Take back."""
    op.drop_table("trainer_steps")
    op.drop_index("ix_trainer_quarantine_trajectory", "trainer_quarantine")
    op.drop_index("ix_trainer_quarantine_run_created", "trainer_quarantine")

    op.drop_table("trainer_quarantine")
    op.drop_index("ix_trainer_consumed_run_step", "trainer_consumed")

    op.drop_table("trainer_consumed")
    op.drop_index("ix_trainer_checkpoints_created", "trainer_checkpoints")

    op.drop_table("trainer_checkpoints")
    op.drop_index("ix_trainer_runs_state_created", "trainer_runs")
    op.drop_index("ix_trainer_runs_created", "trainer_runs")

    op.drop_table("trainer_runs")
    op.drop_table("trainer_idempotency")
