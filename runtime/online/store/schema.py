"""The tables. A change here needs a step in `migrations/versions`, which a test compares with this."""

import sqlalchemy as sa

METADATA = sa.MetaData()

# SQLite numbers rows by itself only where the key is called INTEGER.
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")

models = sa.Table(
    "models",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    # Kept in step with `served` in the same transactions: counting them would read the whole file.
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
)

bundles = sa.Table(
    "bundles",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("exits", sa.Integer, nullable=False),
    sa.Column("classes", sa.Integer, nullable=False),
    sa.UniqueConstraint("model", "digest", name="bundles_of_model"),
)

served = sa.Table(
    "served",
    METADATA,
    sa.Column("seq", _NUMBER, primary_key=True),
    sa.Column("model", sa.Integer, nullable=False),
    sa.Column("bundle", sa.Integer, nullable=False),
    # UTF-8 with lone surrogates: ids come from JSON, which has them, and NUL, and neither is text to PostgreSQL.
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
sa.Index("served_in_order", served.c.model, served.c.time)
# The few rows that a refit needs are found without reading the many between them.
for _name, _few in (("served_labelled", served.c.label.is_not(None)), ("served_complete", served.c.complete)):
    sa.Index(_name, served.c.bundle, served.c.time, sqlite_where=_few, postgresql_where=_few)

gone = sa.Table(
    "gone",
    METADATA,
    sa.Column("id", _NUMBER, primary_key=True),
    sa.Column("model", sa.Integer, nullable=False),
    sa.Column("hash", sa.BigInteger, nullable=False),
)
sa.Index("gone_by_hash", gone.c.model, gone.c.hash)

labellers = sa.Table(
    "labellers",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False, unique=True),
)

states = sa.Table(
    "states",
    METADATA,
    sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), primary_key=True, autoincrement=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("bundle", sa.Text, nullable=False),
    sa.Column("point", sa.Text, nullable=False),
    sa.Column("calibration", sa.Integer, nullable=False),
    sa.Column("frozen", sa.Boolean, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
)

versions = sa.Table(
    "versions",
    METADATA,
    sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("parent", sa.Integer, nullable=False),
    sa.Column("time", sa.Double, nullable=False),
    sa.Column("bundle", sa.Text, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)

decisions = sa.Table(
    "decisions",
    METADATA,
    sa.Column("id", _NUMBER, primary_key=True),
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

leases = sa.Table(
    "leases",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("until", sa.Double, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
)
