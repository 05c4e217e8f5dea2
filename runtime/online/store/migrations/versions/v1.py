"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "models",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "bundles",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("exits", sa.Integer, nullable=False),
        sa.Column("classes", sa.Integer, nullable=False),
        sa.UniqueConstraint("model", "digest", name="bundles_of_model"),
    )
    op.create_table(
        "served",
        sa.Column("seq", number, primary_key=True),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("bundle", sa.Integer, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("row", sa.Integer, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("point", sa.Text, nullable=False),
        sa.Column("exit", sa.SmallInteger, nullable=False),
        sa.Column("abstained", sa.Boolean, nullable=False),
        sa.Column("shadow", sa.Double, nullable=False),
        sa.Column("asked", sa.Double, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("label", sa.Integer),
        sa.Column("labelled", sa.Double),
        sa.Column("key", sa.Integer),
        sa.Column("exits", sa.LargeBinary, nullable=False),
        sa.Column("inputs", sa.LargeBinary),
        sa.UniqueConstraint("model", "request", "row", name="served_by_request"),
    )
    op.create_index("served_in_order", "served", ["model", "time"])
    for name, few in (("served_labelled", "label IS NOT NULL"), ("served_complete", "complete")):
        where = sa.text(few)
        op.create_index(name, "served", ["bundle", "time"], sqlite_where=where, postgresql_where=where)
    op.create_table(
        "gone",
        sa.Column("id", number, primary_key=True),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("hash", sa.BigInteger, nullable=False),
    )
    op.create_index("gone_by_hash", "gone", ["model", "hash"])
    op.create_table(
        "labellers",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False, unique=True),
    )
    op.create_table(
        "states",
        sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), primary_key=True, autoincrement=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("bundle", sa.Text, nullable=False),
        sa.Column("point", sa.Text, nullable=False),
        sa.Column("calibration", sa.Integer, nullable=False),
        sa.Column("frozen", sa.Boolean, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), primary_key=True, autoincrement=False),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("parent", sa.Integer, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("bundle", sa.Text, nullable=False),
        sa.Column("method", sa.Text, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_table(
        "decisions",
        sa.Column("id", number, primary_key=True),
        sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("token", sa.BigInteger),
        sa.Column("version", sa.Integer),
        sa.Column("numbers", sa.Text, nullable=False),
        sa.UniqueConstraint("model", "revision", name="decisions_in_order"),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
    )
