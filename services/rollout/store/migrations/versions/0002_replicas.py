"""Replicas: who is alive, who owns what, and who may change the weights."""

import sqlalchemy as sa
from alembic import op

import practicum.db.engine

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollout_replicas",
        sa.Column("instance", sa.String(length=200), nullable=False),
        sa.Column("life", sa.String(length=64), nullable=False),
        sa.Column("num_beats", sa.BigInteger(), nullable=False),
        sa.Column("joined_at", practicum.db.engine.UtcDateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("instance", name=op.f("pk_rollout_replicas")),
    )
    lease = op.create_table(
        "rollout_weights_lease",
        sa.Column("only_row", sa.Boolean(), nullable=False),
        sa.Column("holder", sa.String(length=200), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("num_loads", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("only_row", name=op.f("pk_rollout_weights_lease")),
    )
    op.bulk_insert(lease, [{"only_row": True, "holder": "", "fence": 0, "num_loads": 0}])
    op.create_table(
        "rollout_weight_loads",
        sa.Column("label", sa.String(length=64), nullable=False),
        sa.Column("load_id", sa.BigInteger(), nullable=False),
        sa.Column("engine_url", sa.String(length=500), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("weight_version", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("label", name=op.f("pk_rollout_weight_loads")),
    )
    with op.batch_alter_table("rollout_weight_loads", schema=None) as batch_op:
        batch_op.create_index("ix_rollout_weight_loads_state", ["state"], unique=False)
        batch_op.create_index("ix_rollout_weight_loads_load_id", ["load_id"], unique=False)
        batch_op.create_index(
            "ix_rollout_weight_loads_run_id_weight_version", ["run_id", "weight_version"], unique=False
        )
    with op.batch_alter_table("rollout_serving", schema=None) as batch_op:
        batch_op.add_column(sa.Column("is_proven", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.add_column(sa.Column("fence", sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("rollout_tasks", schema=None) as batch_op:
        batch_op.add_column(sa.Column("owner", sa.String(length=200), nullable=True))
    with op.batch_alter_table("rollout_episodes", schema=None) as batch_op:
        batch_op.add_column(sa.Column("owner", sa.String(length=200), nullable=True))
    with op.batch_alter_table("rollout_evaluations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("busy_slot_seconds", sa.Float(), nullable=True))
        batch_op.add_column(sa.Column("available_slot_seconds", sa.Float(), nullable=True))
    # A share of one slot second is the same share.
    op.execute(
        "UPDATE rollout_evaluations SET busy_slot_seconds = engine_utilisation, available_slot_seconds = 1 "
        "WHERE engine_utilisation IS NOT NULL"
    )
    with op.batch_alter_table("rollout_evaluations", schema=None) as batch_op:
        batch_op.drop_column("engine_utilisation")


def downgrade() -> None:
    with op.batch_alter_table("rollout_evaluations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("engine_utilisation", sa.Float(), nullable=True))
    op.execute(
        "UPDATE rollout_evaluations SET engine_utilisation = busy_slot_seconds / available_slot_seconds "
        "WHERE available_slot_seconds > 0"
    )
    with op.batch_alter_table("rollout_evaluations", schema=None) as batch_op:
        batch_op.drop_column("available_slot_seconds")
        batch_op.drop_column("busy_slot_seconds")
    with op.batch_alter_table("rollout_episodes", schema=None) as batch_op:
        batch_op.drop_column("owner")
    with op.batch_alter_table("rollout_tasks", schema=None) as batch_op:
        batch_op.drop_column("owner")
    with op.batch_alter_table("rollout_serving", schema=None) as batch_op:
        batch_op.drop_column("fence")
        batch_op.drop_column("is_proven")
    op.drop_table("rollout_weight_loads")
    op.drop_table("rollout_weights_lease")
    op.drop_table("rollout_replicas")
