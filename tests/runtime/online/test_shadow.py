"""Rows that are run to the end after they were answered: drawn by chance, a bounded number, in nobody's way."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.runtime import Cascade, InputError, Online, OperatingPoint, metrics, sample
from offramp.runtime.online.fitting.recalibrator import Recalibrator
from offramp.runtime.online.gauges import measure
from offramp.runtime.online.shadow import MOST_BYTES, MOST_ROWS, Shadow, ShadowRuns, Waiting

X, Y = sample.heldout()
POINT = OperatingPoint((2.0, 3.0, float("-inf")), name="full")  # the name of one that the bundle has


# ---------------------------------------------------------------- who is drawn


def test_the_share_of_those_who_lack_an_exit_is_drawn_and_nobody_else():
    lacks = np.arange(40_000) % 3 < 2
    drawn = Shadow(0.3, np.random.default_rng(0)).draw(lacks)
    assert not drawn[~lacks].any()
    assert drawn[lacks].mean() == pytest.approx(0.3, abs=0.02)
    assert Shadow(1.0).draw(lacks).tolist() == lacks.tolist()
    assert not Shadow(0.0).draw(lacks).any()
    assert not Shadow(0.5).draw(lacks, chance=0.0).any()


def hit(shadow, rows, chance):
    hits = shadow.hits(rows, chance)
    return np.zeros(rows, bool) if hits is None else hits


@given(st.lists(st.integers(0, 40), max_size=60), st.floats(0.01, 1), st.integers(0, 10**6))
def test_who_is_hit_does_not_depend_on_how_rows_come_together(sizes, chance, seed):
    pieces, whole = (Shadow(0.5, np.random.default_rng(seed)) for _ in range(2))
    found = np.concatenate([np.zeros(0, bool), *(hit(pieces, rows, chance) for rows in sizes)])
    assert found.tolist() == hit(whole, sum(sizes), chance).tolist()


def test_each_row_is_hit_with_its_chance_by_itself_whatever_the_chances_before():
    shadow, chances = Shadow(0.5, np.random.default_rng(1)), [0.3, 0.05, 0.3]
    found = {chance: [] for chance in chances}
    for turn in range(60_000):
        chance = chances[turn // 7 % 3] if turn % 2 else chances[turn % 3]
        found[chance].append(hit(shadow, 2, chance))
    for chance, pairs in found.items():
        first, second = np.array(pairs).T
        few = 5 * np.sqrt(chance * (1 - chance) / len(first))
        assert abs(first.mean() - chance) < few
        assert abs(second.mean() - chance) < few
        assert abs((first & second).mean() - chance**2) < few


@given(st.floats(0, 1), st.integers(0, 10_000), st.floats(0, 2000))
def test_whoever_is_drawn_finds_room(share, early, room):
    chance = Shadow(share).chance(early, room)
    assert 0 <= chance <= share
    likely = chance * early
    assert early <= room or not share or likely + 5 * np.sqrt(likely) <= room + 1e-6
    assert chance == share or room < share * early + 5 * np.sqrt(share * early) + 1e-6 or room < 6


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "half"])
def test_a_share_is_a_share(share):
    with pytest.raises(InputError, match="shadow"):
        Shadow(share)


# ---------------------------------------------------------------- who waits


class Machine:
    """Runs rows when it is told to, and remembers what came of them."""

    def __init__(self):
        self.go, self.done = threading.Event(), []

    def run(self, inputs):
        self.go.wait()
        with Cascade.load(sample.BUNDLE, threads=1) as cascade:
            return cascade.record(inputs)

    def complete(self, requests, rows, score, logits):
        self.done.append((list(requests), list(rows), score.shape, len(logits)))


def waiting(machine, rows, run=None, size=None):
    images = np.zeros((rows, 8, 8), np.uint8) if size is None else np.zeros((rows, size), np.uint8)
    return Waiting([("r", k) for k in range(rows)], {"x": images}, {"x": 0}, run or machine.run)


def test_a_bounded_number_waits_and_nobody_waits_for_them():
    machine = Machine()
    runs = ShadowRuns(machine.complete)
    assert runs.room(64) == MOST_ROWS
    assert runs.room(MOST_BYTES / 10) == 10
    assert runs.put(waiting(machine, MOST_ROWS - 10))
    assert runs.room(64) == 10
    assert not runs.put(waiting(machine, 11))
    assert not runs.put(waiting(machine, 1, size=MOST_BYTES))
    assert runs.lost == 12
    assert not runs.wait(0.01)
    machine.go.set()
    assert runs.wait(60)
    assert sum(len(rows) for _, rows, _, _ in machine.done) == MOST_ROWS - 10
    assert [row for _, rows, _, _ in machine.done for row in rows] == list(range(MOST_ROWS - 10))
    assert all(shape == (3, len(rows)) and exits == 3 for _, rows, shape, exits in machine.done)
    assert runs.room(64) == MOST_ROWS
    runs.close()
    assert runs.room(64) == 0


def test_what_waits_when_it_is_closed_is_dropped():
    machine = Machine()
    runs = ShadowRuns(machine.complete)
    started = threading.Event()

    def run(inputs):
        started.set()
        return machine.run(inputs)

    for _ in range(3):
        assert runs.put(waiting(machine, 40, run))
    started.wait()
    end = threading.Thread(target=runs.close)
    end.start()
    while runs.room(64) != 0:
        threading.Event().wait(0.001)
    machine.go.set()
    end.join()
    assert sum(len(rows) for _, rows, _, _ in machine.done) + runs.lost == 120
    assert runs.lost >= 80
    assert not runs.put(waiting(machine, 1))


def test_rows_that_cannot_be_run_are_told_and_the_others_go_on(caplog):
    machine = Machine()
    machine.go.set()
    runs = ShadowRuns(machine.complete)

    def broken(inputs):
        raise MemoryError("no room")

    runs.put(waiting(machine, 3, broken))
    runs.put(waiting(machine, 4))
    assert runs.wait(60)
    assert "3 rows couldn't be run to the end: no room" in caplog.text
    assert len(machine.done) == 1
    assert runs.lost == 3
    runs.close()


# ---------------------------------------------------------------- a cascade with them


@pytest.fixture
def load(tmp_path):
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    made = []

    def start(**online):
        learning = Online(tmp_path / "kept.db", **{"every": 10**6, **online})
        made.append(Cascade.load(sample.BUNDLE, operating_point=POINT, threads=1, recalibration=learning))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_every_row_has_all_exits_known_where_all_are_drawn(load):
    cascade = load(shadow=1.0)
    images = X.copy()
    out = cascade.predict({"x": images})
    images[:] = 0  # the caller's arrays are the caller's
    assert cascade.recalibration.settle()
    window = cascade.recalibration.window("full")
    assert window.complete.all()
    assert (window.shadow == 1).all()
    assert np.array_equal(window.exit, out.exit)
    records = cascade.record({"x": X})
    assert np.allclose(window.score, records.score, atol=1e-4)
    assert np.array_equal(window.tops, records.label)


def test_a_share_is_drawn_whoever_is_right_and_weighs_as_it_should(load):
    cascade = load(shadow=0.25)
    for _ in range(8):
        out = cascade.predict({"x": X})
        cascade.feedback(out.ids, Y)
    assert cascade.recalibration.settle()
    window = cascade.recalibration.window("full")
    early = window.exit < 2
    assert (window.shadow[early] == 0.25).all()
    assert (window.shadow[~early] == 1).all()
    assert window.complete[~early].all()
    assert window.complete[early].mean() == pytest.approx(0.25, abs=0.05)
    assert window.complete_weights[window.complete].sum() == pytest.approx(len(window), rel=0.1)
    assert cascade.recalibration.gauges("full").eefp[0] > 0.5


def test_exits_that_a_point_never_asks_are_seen_as_well(load):
    cascade = load(shadow=1.0).at("full")
    cascade.predict({"x": X[:100]})
    cascade.recalibration.settle()
    assert cascade.recalibration.window("full").complete.all()


def test_nothing_is_drawn_where_nobody_wants_it(load):
    cascade = load(shadow=0.0)
    cascade.predict({"x": X})
    cascade.recalibration.settle()
    window = cascade.recalibration.window("full")
    assert not window.complete[window.exit < 2].any()
    assert (window.shadow[window.exit < 2] == 0).all()


def test_a_temperature_that_ece_would_welcome_is_refused_where_it_ranks_rows_worse(load):
    cascade = load(shadow=1.0, every=200, mode="automatic", recalibrator=Recalibrator("temperature"))
    balanced, learning = cascade.at("balanced"), cascade.recalibration
    rng = np.random.default_rng(0)
    for _ in range(10):
        picks = rng.integers(0, len(X), 200)
        out = balanced.predict({"x": X[picks]})
        learning.settle()
        # A quarter of the labels is another class, so every exit is far too sure of itself.
        cascade.feedback(out.ids, np.where(rng.random(200) < 0.25, rng.integers(0, 10, 200), Y[picks]))
    assert learning.version == 0
    log = [one for one in learning.decisions() if one.kind == "refuse"]
    assert "Nearer to what happened" in log[0].numbers["reason"]
    assert "but it ranks rows worse: EEFP of exit 0 changes by -0.01" in log[0].numbers["reason"]
    assert log[0].numbers["ranking"][1]["upper"] < -0.005

    window, incumbent = learning.window("balanced"), learning.calibration.point("balanced")
    first, later = window.take(np.arange(1000)), window.take(np.arange(1000, 2000))
    candidate = Recalibrator("temperature").refit(first, incumbent).point
    old, new = measure(later, incumbent), measure(later, candidate)
    assert new.ece[0] < old.ece[0] - 0.05
    right = later.tops == later.label
    old_eefp, new_eefp = (
        metrics.eefp(np.stack([later.log_odds_at(j, point.calibrator(j), np.arange(1000)) for j in range(3)]), right)
        for point in (incumbent, candidate)
    )
    assert new_eefp[0] < old_eefp[0] - 0.005


def test_thresholds_are_derived_again_for_a_person_to_promote(load):
    cascade = load(shadow=1.0)
    balanced, learning = cascade.at("balanced"), cascade.recalibration
    with pytest.raises(InputError, match="0 rows have all exits known"):
        learning.rederive("balanced", by="somebody")
    for _ in range(2):
        cascade.feedback(balanced.predict({"x": X}).ids, Y)
    learning.settle()
    before = balanced.operating_point
    found = learning.rederive("balanced", "shares", by="somebody")
    assert found.kind == "propose"
    assert learning.version == 0
    assert learning.decisions()[-1].by == "somebody"
    learning.promote(found.numbers["version"], by="somebody")
    out = balanced.predict({"x": X})
    assert balanced.operating_point.thresholds == found.point.thresholds != before.thresholds
    assert (np.bincount(out.exit) / len(X)) == pytest.approx(before.expected["exit_shares"], abs=0.08)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_ends_with_its_own_exit_code(tmp_path):
    program = f"""if True:
        import os, sys
        from offramp.runtime import Cascade, Online, OperatingPoint, sample
        images = sample.heldout()[0]
        point = OperatingPoint((2.0, 3.0, float("-inf")), name="full")
        learning = Online({str(tmp_path / "kept.db")!r}, shadow=1.0)
        cascade = Cascade.load(sample.BUNDLE, operating_point=point, threads=1, recalibration=learning)
        cascade.predict({{"x": images[:50]}})
        child = os.fork()
        if child == 0:
            del cascade
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert cascade.recalibration.settle()
        assert cascade.recalibration.window("full").complete.all()
        cascade.predict({{"x": images}})  # and it ends while rows wait
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
