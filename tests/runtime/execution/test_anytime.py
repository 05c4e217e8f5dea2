"""Answers that are cut short: by a last exit, by a deadline, or by whoever looks at them exit by exit."""

import math
import time

import numpy as np
import pytest
from offramp.runtime import Cascade, InputError, OperatingPoint, sample
from offramp.runtime import cascade as cascade_module

FIELDS = ("label", "exit", "abstain", "flops")


@pytest.fixture(params=["cpu", "torch:cpu"])
def cascade(request, monkeypatch):
    if request.param != "cpu":
        pytest.importorskip("torch", reason="the device path runs on torch's memory")
        pytest.importorskip("onnx", reason="the torch executor reads ONNX graphs")
        monkeypatch.setenv("TRITON_INTERPRET", "0")  # its interpreter has its own tests
    with Cascade.load(sample.BUNDLE, request.param, batch_rows=50) as loaded:
        score = loaded.record({"x": sample.heldout()[0]}).score
        middle = [float(np.median(s)) for s in score]
        yield loaded.at(OperatingPoint((middle[0], middle[1], -math.inf), abstain_below=1.0, name="middle"))


@pytest.fixture
def x():
    return {"x": sample.heldout()[0][:120]}  # more than two batches


def same(one, other, rows=slice(None)):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name)[rows], getattr(other, name)[rows])
    np.testing.assert_allclose(one.log_odds[rows], other.log_odds[rows], atol=1e-4)


def test_each_look_has_every_row_and_the_last_is_what_predict_gives(cascade, x):
    whole, records = cascade.predict(x), cascade.record(x)
    looks = list(cascade.anytime(x))
    assert len(looks) == 3
    for j, look in enumerate(looks):
        gone = whole.exit <= j
        np.testing.assert_array_equal(look.involuntary, ~gone)
        np.testing.assert_array_equal(look.exit, np.minimum(whole.exit, j))
        same(look, whole, gone)
        np.testing.assert_array_equal(look.label[~gone], records.label[j, : len(gone)][~gone])
    same(looks[-1], whole)
    assert not looks[-1].involuntary.any()
    assert 0 < looks[-1].executed[0] <= whole.executed[0]  # a device may fill batches up
    assert looks[0].executed[1:] == (0, 0)
    assert 0 < (whole.exit == 0).sum() < 120


def test_a_look_does_not_change_when_more_is_run(cascade, x):
    looks = cascade.anytime(x)
    first = next(looks)
    before = first.label.copy(), first.exit.copy(), first.confidence.copy()
    second = next(looks)
    for kept, now in zip(before, (first.label, first.exit, first.confidence), strict=True):
        np.testing.assert_array_equal(kept, now)
    assert (second.exit > 0).any()
    assert not np.array_equal(second.confidence, first.confidence)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_nobody_goes_past_max_exit_and_who_would_have_is_involuntary(cascade, x, last):
    whole, cut = cascade.predict(x), cascade.predict(x, max_exit=last)
    assert cut.exit.max() == last
    gone = whole.exit <= last
    np.testing.assert_array_equal(cut.involuntary, ~gone)
    same(cut, whole, gone)
    np.testing.assert_array_equal(cut.exit, np.minimum(whole.exit, last))
    np.testing.assert_array_equal(cut.probabilities.argmax(axis=1), cut.label)


def test_max_exit_opens_an_exit_that_is_switched_off(cascade, x):
    cut = cascade.at("full").predict(x, max_exit=1)
    assert (cut.exit == 1).all()
    assert cut.involuntary.all()


def test_a_deadline_that_is_over_leaves_the_first_exit_and_a_far_one_changes_nothing(cascade, x):
    whole = cascade.predict(x, deadline=3600.0)
    same(whole, cascade.predict(x))
    assert not whole.involuntary.any()
    hurried = cascade.predict(x, deadline=0.0, fetch=("probabilities",))
    assert (hurried.exit == 0).all()
    np.testing.assert_array_equal(hurried.involuntary, cascade.predict(x).exit > 0)
    np.testing.assert_array_equal(hurried.probabilities.argmax(axis=1), hurried.label)


def test_what_is_over_between_two_batches_leaves_the_rest_where_it_is(cascade, x, monkeypatch):
    """The clock is asked before each batch behind the first exit: here it runs out before the second of them."""
    asked = iter([0.0, 0.5, *[2.0] * 20])
    monkeypatch.setattr(cascade_module, "monotonic", lambda: next(asked))  # other threads keep theirs
    out = cascade.predict(x, deadline=1.0)
    monkeypatch.undo()
    whole = cascade.predict(x)
    reached = np.arange(120) < 50
    np.testing.assert_array_equal(out.exit[reached], np.minimum(whole.exit, 1)[reached])
    assert (out.exit[~reached] == 0).all()
    np.testing.assert_array_equal(out.involuntary, whole.exit > out.exit)


def test_both_limits_hold_at_once(cascade, x):
    out = cascade.predict(x, deadline=3600.0, max_exit=1)
    same(out, cascade.predict(x, max_exit=1))
    np.testing.assert_array_equal(out.involuntary, cascade.predict(x).exit > 1)


def test_no_rows_and_one_row(cascade):
    none = {"x": sample.heldout()[0][:0]}
    assert [len(look) for look in cascade.anytime(none)] in ([], [0, 0, 0], [0])
    assert len(cascade.predict(none, deadline=1.0)) == len(cascade.predict(none, max_exit=0)) == 0
    one = {"x": sample.heldout()[0][:1]}
    same(cascade.predict(one, deadline=3600.0), cascade.predict(one))


@pytest.mark.parametrize("wrong", [3, -1, 1.5, "1", True])
def test_an_exit_that_is_none_is_named(cascade, x, wrong):
    with pytest.raises(InputError, match=r"max_exit is .*, expected 0 to 2 \(the exits"):
        cascade.predict(x, max_exit=wrong)


@pytest.mark.parametrize("wrong", [-0.1, math.nan, "1", True])
def test_a_deadline_that_is_none_is_named(cascade, x, wrong):
    with pytest.raises(InputError, match=r"deadline is .*, expected seconds from now"):
        cascade.predict(x, deadline=wrong)


def test_what_was_not_fetched_of_a_hurried_answer_is_said_to_be_gone(cascade, x):
    with pytest.raises(InputError, match="probabilities of answers that may have been cut short"):
        _ = cascade.predict(x, deadline=time.monotonic()).probabilities


@pytest.mark.parametrize("max_exit", [0, 1])
def test_full_cut_short_is_as_sure_as_the_exit_is_calibrated_to_be(cascade, x, max_exit):
    full, balanced = cascade.at("full"), cascade.operating_points["balanced"]  # which lets fewer leave than fast
    out = full.predict(x, max_exit=max_exit)
    assert (out.exit == max_exit).all()
    alone = [math.inf] * max_exit + [-math.inf] * (3 - max_exit)
    own = OperatingPoint(tuple(alone), full.operating_point.abstain_below, "own", balanced.calibrators)
    same(out, cascade.at(own).predict(x))
    np.testing.assert_allclose(out.probabilities.max(axis=1), out.confidence, atol=1e-5)


@pytest.mark.parametrize("max_exit", [None, 0, 1])
def test_what_was_only_timed_is_whole_so_the_rest_can_still_be_got(cascade, x, max_exit):
    timed = cascade.predict(x, fetch=("times",), max_exit=max_exit)
    np.testing.assert_array_equal(timed.probabilities.argmax(axis=1), timed.label)
    np.testing.assert_allclose(timed.probabilities.max(axis=1), timed.confidence, atol=1e-5)


def test_a_cascade_and_its_answers_say_what_they_are(cascade, x):
    out = cascade.predict(x, max_exit=0)
    assert repr(out).startswith("<Predictions: 120 rows; 120 at exit 0; ")
    assert f"{int(out.involuntary.sum())} involuntary" in repr(out)
    assert "3 exits, 10 classes, at 'middle' (leaves at 0, 1, 2)" in repr(cascade)
    assert cascade.exits == [one.name for one in cascade.manifest.exits]
    assert set(cascade.operating_points) >= {"full"}
    assert out.class_name == [cascade.classes[k] for k in out.label]
