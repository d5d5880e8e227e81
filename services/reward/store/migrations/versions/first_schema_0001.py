"""The reward service's first schema"""

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
        "reward_grades",
        sa.Column("trajectory_id", sa.String(length=200), nullable=False),
        sa.Column("run_id", sa.String(length=200), nullable=False),
        sa.Column("task_id", sa.String(length=200), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("grade", JsonText(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("trajectory_id", name=op.f("pk_reward_grades")),
    )
    op.create_index("ix_reward_grades_created", "reward_grades", ["created_at", "trajectory_id"])
    op.create_index("ix_reward_grades_run", "reward_grades", ["run_id", "created_at", "trajectory_id"])


def downgrade() -> None:
    """Take back."""
    op.drop_table("reward_grades")
