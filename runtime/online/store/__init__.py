"""What was served, the labels that came back, and the desired state: in one SQLite file, or a PostgreSQL database.

`Store.open` in `store.py` is the way in; `served.py` has what is handed to it. Needs the extra `online`.
"""

from offramp.runtime.errors import RuntimeUnavailable, how_to_install

try:
    import alembic as alembic
    import sqlalchemy as sqlalchemy
except ImportError as error:
    raise RuntimeUnavailable(
        f"keeping served rows needs SQLAlchemy and Alembic, which aren't installed. {how_to_install('online')}"
    ) from error
