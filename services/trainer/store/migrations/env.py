"""Alembic's way into the trainer's schema."""

from practicum.db.migrate import run_env
from services.trainer.store.tables import metadata

run_env(metadata, "trainer")
