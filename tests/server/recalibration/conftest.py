"""Servers that keep what they answer."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
from offramp.runtime import Cascade, Online
from offramp.runtime.calibration_file import encode_calibration

pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")


@pytest.fixture
def kept(tmp_path):
    """The file of a test's rows."""
    return tmp_path / "kept.db"


@pytest.fixture
def learns(rows_bundle, kept, serve):
    """`with learns(shadow=…) as (server, cascade):` at the balanced point, keeping what is answered."""

    @contextmanager
    def start(*, shadow=0.0, **settings):
        given = Online(kept, shadow=shadow)
        with (
            Cascade.load(rows_bundle, threads=1, operating_point="balanced", recalibration=given) as cascade,
            serve(cascade, **settings) as server,
        ):
            yield server, cascade

    return start


@pytest.fixture
def put_in_force(kept):
    """put_in_force(cascade): a calibration under which everybody abstains; its version."""

    def decide(cascade):
        from offramp.runtime.online.store.control import Draft
        from offramp.runtime.online.store.store import Store

        manifest, now = cascade.manifest, cascade.recalibration.calibration
        points = {name: replace(one, abstain_below=math.inf) for name, one in now.points.items()}
        made = encode_calibration(
            replace(now, points=points), manifest.digest, created="2026-01-01T00:00:00Z", producer="tests"
        )
        shape = {"exits": len(manifest.exits), "classes": manifest.classes}
        with Store.open(kept, model=manifest.name, bundle=manifest.digest, **shape) as store:
            draft = Draft("rank_preserving", made.decode(), in_force=True)
            return store.decide("accept", {"why": "a test"}, by="a test", draft=draft).calibration

    return decide
