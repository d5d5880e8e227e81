"""SQL plumbing: engines, types and migrations on SQLite and PostgreSQL alike."""
