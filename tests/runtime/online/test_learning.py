"""A cascade that keeps what it answers and learns from labels, from the first row to a version in force."""

import json
import shutil

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, Online, OperatingPoint, sample
from offramp.runtime.calibration_file import Calibration, write_calibration
from offramp.runtime.errors import NotLeader
from offramp.runtime.files import seal
from offramp.runtime.online.fitting.recalibrator import Recalibrator
from offramp.runtime.online.learning import Learning

pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")

from offramp.runtime.online.store.store import Store

X, Y = sample.heldout()
NOISE = 0.25  # of all labels are another class: every exit is far too sure of itself


@pytest.fixture
def load(tmp_path):
    """load(mode=…, …) -> the digits' cascade, keeping its rows in one file; all are closed in the end."""
    made = []

    def start(bundle=sample.BUNDLE, *, point="free", **online):
        # Where every row is as good as sure, the power family moves nothing.
        options = {"every": 100, "shadow": 0.0, "recalibrator": Recalibrator("rank_preserving_isotonic"), **online}
        point = OperatingPoint((2.0, 3.0, float("-inf")), name="free") if point == "free" else point
        made.append(
            Cascade.load(
                bundle, operating_point=point, threads=1, recalibration=Online(tmp_path / "kept.db", **options)
            )
        )
        return made[-1]

    yield start
    for one in made:
        one.close()


def stream(cascade, rounds, seed=0):
    """Rows that come back with labels, a quarter of them wrong."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        picks = rng.integers(0, len(X), 100)
        out = cascade.predict({"x": X[picks]})
        labels = np.where(rng.random(100) < NOISE, rng.integers(0, 10, 100), Y[picks])
        assert set(cascade.feedback(list(out.ids), labels.tolist())) == {"accepted"}


def kinds(cascade):
    return [one.kind for one in cascade.recalibration.decisions()]


def test_answers_are_those_of_a_cascade_that_keeps_nothing(load):
    cascade = load()
    with Cascade.load(sample.BUNDLE, operating_point=cascade.operating_point, threads=1) as plain:
        ours, its = cascade.predict({"x": X}), plain.predict({"x": X})
    assert np.array_equal(ours.label, its.label)
    assert np.array_equal(ours.exit, its.exit)
    assert np.array_equal(ours.flops, its.flops)
    assert np.allclose(ours.score, its.score, atol=1e-4)
    assert len(set(ours.ids)) == len(X)
    with pytest.raises(InputError, match="aren't kept"):
        _ = its.ids
    with pytest.raises(InputError, match="keeps nothing"):
        plain.feedback(["a/0"], [1])


def test_what_every_exit_that_ran_said_is_kept(load, tmp_path):
    point = OperatingPoint((2.0, 3.0, float("-inf")), name="full")  # the name of one that the bundle has
    cascade = load(point=point, shadow=0.0)
    out = cascade.predict({"x": X})
    cascade.feedback(list(out.ids), Y.tolist())
    records = cascade.record({"x": X})
    gauges = cascade.recalibration.gauges("full")
    assert (gauges.rows, gauges.labelled) == (len(X), len(X))
    assert gauges.selective_risk == pytest.approx((out.label != Y).mean())
    window = cascade.recalibration.window("full")
    order = np.argsort(window.score[0], kind="stable")
    mine = np.argsort(records.score[0], kind="stable")
    ran = np.arange(3)[:, None] <= out.exit[mine]
    assert np.array_equal(np.isnan(window.score[:, order]), ~ran)
    assert np.allclose(window.score[:, order][ran], records.score[:, mine][ran], atol=1e-4)
    z = records.logits[:, mine]
    assert np.allclose(window.logits[:, order][ran], (z - z.max(axis=-1, keepdims=True))[ran], atol=0.05)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The digits as an earlier offramp wrote them."""
    copy = shutil.copytree(sample.BUNDLE, tmp_path_factory.mktemp("earlier") / "b")
    document = json.loads((copy / "manifest.json").read_text())
    del document["cascade"]["every_exit"], document["digest"]
    (copy / "manifest.json").write_bytes(seal(document))
    (copy / "calibration.json").unlink()
    return copy


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("bars", [(2.0, 3.0), (np.inf, 3.0), (2.0, np.inf), (np.inf, np.inf)], ids=str)
@pytest.mark.parametrize("one_graph", [True, False])
def test_what_is_kept_is_the_same_by_whatever_way_it_came(load, earlier, rows, bars, one_graph):
    point = OperatingPoint((*bars, float("-inf")), name="full")
    cascade = load(sample.BUNDLE if one_graph else earlier, point=point)
    exits_open = np.isfinite([*bars, 0.0])
    assert ("cascade_every_exit.onnx" in cascade.executor.opened) == (one_graph and exits_open[:-1].any())
    assert "cascade.onnx" not in cascade.executor.opened
    outs = [cascade.predict({"x": X[k : k + rows]}) for k in range(0, 40, rows)]
    ids, exits, abstain = (np.concatenate([getattr(out, name) for out in outs]) for name in ("ids", "exit", "abstain"))
    assert cascade.feedback(ids.tolist(), Y[:40].tolist()) == ["accepted"] * 40
    found, records = cascade.recalibration.window("full"), cascade.record({"x": X[:40]})
    assert found.exit.tolist() == exits.tolist()
    assert found.abstained.tolist() == abstain.tolist()
    assert found.label.tolist() == Y[:40].tolist()
    ran = exits_open[:, None] & (np.arange(3)[:, None] <= exits)
    assert np.array_equal(np.isnan(found.score), ~ran)
    assert np.allclose(found.score[ran], records.score[ran], atol=1e-4)
    z = records.logits
    assert np.allclose(found.logits[ran], (z - z.max(axis=-1, keepdims=True))[ran], atol=0.05)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_look_at_probabilities_keeps_no_row_again(load, rows):
    cascade = load()
    out = cascade.predict({"x": X[:rows]})
    assert out.probabilities.shape == (rows, 10)
    assert cascade.feedback(out.ids.tolist(), Y[:rows].tolist()) == ["accepted"] * rows
    assert len(cascade.recalibration.window("free").label) == rows


def test_warming_up_keeps_nothing(load):
    cascade = load()
    cascade.warm_up()
    assert cascade.executor.opened == {"cascade_every_exit.onnx"}
    assert cascade.feedback(cascade.predict({"x": X[:1]}).ids.tolist(), [3]) == ["accepted"]
    assert len(cascade.recalibration.window("free").label) == 1


def test_labels_by_name_twice_wrong_or_for_nobody(load):
    cascade = load()
    ids = cascade.predict({"x": X[:2]}).ids.tolist()
    assert cascade.feedback(ids[:1], ["3"]) == ["accepted"]
    assert cascade.feedback(ids[:1], [3]) == ["duplicate"]
    assert cascade.feedback(ids[:1], [4]) == ["conflicting"]
    assert cascade.feedback(["nobody/0"], [4]) == ["unknown"]
    assert cascade.recalibration.delete(ids[:1]) == 2  # both rows of the request
    assert cascade.feedback(ids[1:], [4]) == ["unknown"]
    with pytest.raises(InputError, match=r"ids\[1\] is 'x', expected one of Predictions.ids"):
        cascade.feedback([ids[0], "x"], [1, 1])
    with pytest.raises(InputError, match=r"labels\[0\] is 'zebra'"):
        cascade.feedback(ids[:1], ["zebra"])


def test_labels_are_kept_whatever_becomes_of_looking_at_them(load, monkeypatch, caplog):
    def overtaken(self):
        raise NotLeader("another leads by now.")

    monkeypatch.setattr(Learning, "look", overtaken)
    cascade = load(every=1)
    ids = cascade.predict({"x": X[:3]}).ids
    assert cascade.feedback(ids, Y[:3]) == ["accepted"] * 3
    assert "put off: another leads by now" in caplog.text


def test_rows_that_no_threshold_let_go_are_not_kept(load):
    cascade = load(point="full")
    cut = cascade.predict({"x": X[:5]}, max_exit=0)
    assert cut.involuntary.all()
    assert cascade.feedback(cut.ids.tolist(), [0] * 5) == ["unknown"] * 5


def test_nor_are_those_who_would_have_left_there_anyway(load):
    cascade = load()
    cut = cascade.predict({"x": X[:50]}, max_exit=0)
    assert 0 < cut.involuntary.sum() < 50
    easy = cascade.predict({"x": X[:50][~cut.involuntary]}, max_exit=0)
    assert not easy.involuntary.any()
    assert cascade.recalibration.settle()
    assert len(cascade.recalibration.window("balanced")) == 0
    last = len(cascade.exits) - 1
    assert set(cascade.feedback(cascade.predict({"x": X[:5]}, max_exit=last).ids, Y[:5])) == {"accepted"}


@pytest.mark.parametrize(
    ("ids", "labels", "said"),
    [
        (None, None, "ids is None"),
        ("a/0", [1], "ids is 'a/0'"),
        (["a/0"], None, "labels is None"),
        (["a/0"], 3, "labels is 3"),
    ],
)
def test_what_is_no_list_of_labels_is_named(load, ids, labels, said):
    with pytest.raises(InputError, match=said):
        load().feedback(ids, labels)


@pytest.mark.parametrize("version", [-1, 10**30, "1", None, True])
def test_a_version_is_the_number_of_one(load, version):
    cascade = load()
    ids = cascade.predict({"x": X[:2]}).ids
    with pytest.raises(InputError, match="version is"):
        cascade.recalibration.promote(version, by="somebody")
    with pytest.raises(InputError, match="frozen is"):
        cascade.recalibration.freeze("maybe", by="somebody")
    assert cascade.feedback(ids, Y[:2]) == ["accepted"] * 2


@pytest.mark.parametrize("where", [None, 5, ""])
def test_a_store_lies_somewhere(where):
    with pytest.raises(InputError, match="where is"):
        Online(where)


def test_an_overconfident_point_is_recalibrated_and_nobody_leaves_elsewhere(load):
    cascade = load(point="full", mode="automatic")
    before = cascade.predict({"x": X})
    stream(cascade, 8)
    assert cascade.recalibration.version >= 1
    assert "accept" in kinds(cascade)
    after = cascade.predict({"x": X})
    assert np.array_equal(after.exit, before.exit)
    assert np.array_equal(after.label, before.label)
    assert after.confidence.mean() < before.confidence.mean() - 0.01
    assert np.array_equal(np.argsort(after.confidence, kind="stable"), np.argsort(before.confidence, kind="stable"))
    version = cascade.recalibration.version
    cascade.close()

    again = load(point="full")
    assert again.recalibration.version == version
    assert np.array_equal(again.predict({"x": X}).confidence, after.confidence)
    assert again.recalibration.rollback(by="somebody") == version - 1
    while again.recalibration.version:
        again.recalibration.rollback(by="somebody")
    assert np.array_equal(again.predict({"x": X}).confidence, before.confidence)
    with pytest.raises(InputError, match="there is none before it"):
        again.recalibration.rollback(by="somebody")
    again.recalibration.promote(version, by="somebody")
    assert np.array_equal(again.predict({"x": X}).confidence, after.confidence)


@pytest.mark.parametrize(("mode", "last"), [("off", "begin"), ("observe", "would accept"), ("propose", "propose")])
def test_other_modes_change_nothing_by_themselves(load, mode, last):
    cascade = load(point="full", mode=mode)
    before = cascade.predict({"x": X}).confidence
    stream(cascade, 6)
    assert last in kinds(cascade)
    assert "accept" not in kinds(cascade)
    assert cascade.recalibration.version == 0
    assert np.array_equal(cascade.predict({"x": X}).confidence, before)
    proposed = cascade.recalibration.versions()
    assert bool(proposed) == (mode == "propose")
    if proposed:
        cascade.recalibration.promote(proposed[-1].version, by="somebody")
        assert cascade.predict({"x": X}).confidence.mean() < before.mean()


def test_a_frozen_store_learns_nothing(load):
    cascade = load(point="full", mode="automatic")
    cascade.recalibration.freeze(by="somebody")
    stream(cascade, 6)
    assert cascade.recalibration.version == 0
    cascade.recalibration.freeze(False, by="somebody")
    cascade.recalibration.look()
    stream(cascade, 6, seed=1)
    assert cascade.recalibration.version > 0


def test_a_restart_spends_no_candidates_level_twice(load):
    cascade = load(point="full", mode="observe")
    stream(cascade, 5)
    numbers = [one.numbers["number"] for one in cascade.recalibration.decisions() if one.kind == "trial"]
    cascade.close()
    again = load(point="full", mode="observe")
    stream(again, 2, seed=1)
    later = [one.numbers["number"] for one in again.recalibration.decisions() if one.kind == "trial"]
    assert later[: len(numbers)] == numbers
    assert later == sorted(set(later))
    assert len(later) > len(numbers)


def test_who_leads_again_spends_no_level_that_another_has_spent(load, tmp_path):
    first, second = load(point="full", mode="observe"), load(point="full")
    manifest = first.manifest
    about = {"model": manifest.name, "bundle": manifest.digest, "exits": 3, "classes": manifest.classes}

    def trials():
        return [one for one in first.recalibration.decisions() if one.kind == "trial"]

    with Store.open(tmp_path / "kept.db", **about) as store:
        for cascade, seed in ((first, 0), (second, 1), (first, 2)):
            stream(cascade, 4, seed=seed)
            leader = trials()[-1].by
            store.release(store.lease(f"recalibrate {manifest.name}", leader, 1.0))
    assert len({one.by for one in trials()}) == 2
    numbers = [one.numbers["number"] for one in trials()]
    assert numbers == sorted(set(numbers))


def test_the_log_is_read_once_for_all_points(load, monkeypatch):
    cascade = load(point="full", mode="observe")
    read, decisions = [], Store.decisions
    monkeypatch.setattr(Store, "decisions", lambda self, limit: read.append(limit) or decisions(self, limit))
    assert len(cascade.operating_points) == 3
    cascade.recalibration.look()
    cascade.recalibration.look()
    assert len(read) == 1


def test_a_promise_that_is_broken_ends_in_abstention(load):
    cascade = load(point="fast", mode="automatic")  # promises a selective risk
    stream(cascade, 8)
    assert cascade.recalibration.version >= 1
    accepted = next(one for one in cascade.recalibration.decisions() if one.kind == "accept")
    assert accepted.numbers["promise_broken"]
    assert cascade.predict({"x": X}).abstain.all()


def test_a_calibration_of_the_offline_job_takes_the_place_of_what_was_learnt(load, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for file in sample.BUNDLE.iterdir():
        if file.is_file():
            (bundle / file.name).write_bytes(file.read_bytes())
    cascade = load(bundle, point="full", mode="automatic")
    stream(cascade, 6)
    assert cascade.recalibration.version >= 1
    own = cascade.recalibration.in_force[1]
    manifest = cascade.manifest
    cascade.close()
    new = Calibration({"full": own.point("full")}, version=own.version + 1)
    write_calibration(bundle, manifest, new, created="2026-11-29T00:00:00+00:00", producer="a test")
    again = load(bundle, point="full")
    assert again.recalibration.version == 0
    assert list(again.recalibration.calibration.points) == ["full"]


def test_an_engine_beside_follows(load):
    leader, follower = load(point="full", mode="automatic"), load(point="full")
    stream(leader, 6)
    assert leader.recalibration.version >= 1
    follower.recalibration.follow()
    assert np.array_equal(follower.predict({"x": X}).confidence, leader.predict({"x": X}).confidence)
    assert follower.recalibration.look() == []  # the other leads


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "wild"}, "mode is 'wild'"),
        ({"every": 0}, "every is 0"),
        ({"rows": 0}, "rows is 0"),
        ({"share": 0}, "share is 0"),
        ({"shadow": 1.5}, "shadow is 1.5"),
        ({"shadow": 0.0, "recalibrator": Recalibrator("cwmcs")}, "shadow is 0, but cwmcs can change the order"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        Online("kept.db", **options)
