"""Alembic's entry for the rollout service's schema."""

from practicum.db.migrate import run_env
from services.rollout.store.tables import metadata

run_env(metadata, "rollout")
