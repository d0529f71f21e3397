"""Alembic migrations, applied when the coordinator starts; they travel inside the package."""
