"""`offramp history --online`: what labels made of a bundle's calibration."""

import json
import shutil

import numpy as np
import pytest
from offramp.runtime import Cascade, Online, sample
from offramp.runtime.cli import main

pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")


@pytest.fixture
def learnt(tmp_path):
    """A bundle and a store in which wrong labels have put a version in force."""
    bundle, kept = tmp_path / "bundle", tmp_path / "kept.db"
    shutil.copytree(sample.BUNDLE, bundle)
    images, labels = sample.heldout()
    rng = np.random.default_rng(0)
    learning = Online(kept, mode="automatic", shadow=0.0)
    with Cascade.load(bundle, operating_point="balanced", threads=1, recalibration=learning) as cascade:
        for _ in range(10):
            picks = rng.integers(0, len(images), 100)
            out = cascade.predict({"x": images[picks]})
            wrong = rng.random(100) < 0.3
            cascade.feedback(out.ids, np.where(wrong, (labels[picks] + 1) % 10, labels[picks]))
        assert cascade.recalibration.version >= 1
    return bundle, kept


def test_versions_made_online_stand_below_the_offline_ones(learnt, capsys):
    bundle, kept = learnt
    assert main(["history", str(bundle), "--online", str(kept)]) == 0
    own, _, online = capsys.readouterr().out.partition("\n\n")
    assert "now, since" in own
    assert "mode automatic" in online
    assert "nearer to what happened" in online
    assert main(["history", str(bundle), "--online", str(kept), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["online"]
    assert found["in_force"] == max(one["version"] for one in found["versions"])
    assert found["versions"][0]["parent"] == 0
    assert {one["kind"] for one in found["decisions"]} >= {"trial", "accept"}


def test_a_store_that_is_not_there_or_of_another_bundle_is_named(learnt, tmp_path, capsys):
    bundle, kept = learnt
    assert main(["history", str(bundle), "--online", str(tmp_path / "none.db")]) == 2
    assert "none.db: no such file" in capsys.readouterr().err
    assert main(["history", str(sample.intents(tmp_path / "intents")), "--online", str(kept)]) == 2
    assert "keeps no row of this bundle" in capsys.readouterr().err
