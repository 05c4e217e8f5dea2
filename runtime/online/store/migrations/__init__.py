"""The steps from one schema to the next, as Alembic runs them."""
