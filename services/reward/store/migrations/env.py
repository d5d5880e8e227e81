"""Alembic's way into the reward service's schema."""

from practicum.db.migrate import run_env
from services.reward.store.tables import metadata

run_env(metadata, "reward")
