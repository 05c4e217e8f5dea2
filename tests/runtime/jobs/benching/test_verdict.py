"""The verdict, from figures alone: pays, pays from a batch on, doesn't and why, isn't shown; and what would help."""

import pytest
from offramp.runtime.jobs.benching.turns import Middle
from offramp.runtime.jobs.benching.verdict import Measured, Mode, Verdict, judge, ranked

TIGHT, PACED, EIGHT, MANY = Mode(1), Mode(1, 20.0), Mode(8), Mode(32)


def at(mode, speedup, low=None, high=None, *, heads=0.3):
    """A network of 10 ms: a point this much faster; heads: what they cost, as a share of it."""
    ends = Middle(speedup, speedup - 0.05 if low is None else low, speedup + 0.05 if high is None else high)
    return Measured(mode, ends, plain=0.010, point=0.010 / speedup, nobody=0.010 * (1 + heads))


CASES = [
    ([at(TIGHT, 2.7), at(PACED, 2.0), at(EIGHT, 3.1), at(MANY, 3.3)], "pays: 2.00 to 3.30 times as fast", 4),
    ([at(TIGHT, 0.8), at(PACED, 0.7), at(EIGHT, 1.4), at(MANY, 1.6)], "pays from batch 8 on (1.40 to 1.60", 2),
    ([at(TIGHT, 1.0), at(PACED, 1.0), at(EIGHT, 1.4), at(MANY, 1.4)], "pays from batch 8 on (1.40 times", 2),
    ([at(TIGHT, 1.4), at(PACED, 0.8), at(EIGHT, 1.4), at(MANY, 1.4)], "pays at batch 1, one after another; batch 8", 3),
    ([at(TIGHT, 1.4), at(PACED, 1.4), at(EIGHT, 0.8), at(MANY, 0.8)], "every 20 ms only (1.40 times as fast)", 2),
    ([at(TIGHT, 0.8), at(PACED, 0.7), at(EIGHT, 0.9), at(MANY, 0.9)], "doesn't pay; at batch 1, one every 20 ms it", 0),
    ([at(TIGHT, 1.0), at(PACED, 1.1, 0.9)], "isn't shown to pay; at batch 1, one after another it is 1.00", 0),
    ([at(TIGHT, 2.0), at(EIGHT, 1.8, 0.9, 3.0)], "pays at batch 1, one after another (2.00 times as fast)", 1),
]  # fmt: skip


@pytest.mark.parametrize(("measured", "said", "pays"), CASES)
def test_from_which_batch_on_it_pays(measured, said, pays):
    found = judge("balanced", 3, measured, threads=2)
    assert said in found.sentence
    assert found.sentence.startswith("balanced ")
    assert found.sentence.endswith(".")
    assert len(found.pays) == pays
    assert bool(found.hints) == (pays < len(measured))


def test_a_point_that_loses_says_whether_heads_cost_too_much_or_too_few_leave():
    heads = judge("p", 3, [at(MANY, 0.8, heads=0.5)], threads=2)
    assert "because its heads, gates and what is around them cost 5 ms, more than the 2.5 ms" in heads.sentence
    assert any("repack --auto" in hint for hint in heads.hints)
    assert any("fewer exits" in hint for hint in heads.hints)
    few = judge("p", 3, [at(MANY, 0.98, 0.97, 0.99, heads=0.03)], threads=2)
    assert "because too few rows leave early" in few.sentence
    assert few.hints == ("let more rows leave: `offramp calibrate` with a smaller --budget or a larger --max-drop",)


def test_noise_asks_for_more_rounds_not_for_fewer_exits():
    found = judge("p", 3, [at(TIGHT, 1.5, 0.9, 2.0)], threads=2)
    assert "so few rounds don't show" in found.sentence
    assert all("--seconds" in hint for hint in found.hints)
    slower = judge("p", 3, [at(TIGHT, 0.9, 0.7, 1.1)], threads=2)
    assert "within noise: its heads" in slower.sentence


@pytest.mark.parametrize(
    ("mode", "threads", "hinted"), [(TIGHT, 2, True), (TIGHT, 1, False), (MANY, 2, False), (PACED, 4, True)]
)
def test_fewer_threads_are_only_advised_where_single_rows_lose_on_several(mode, threads, hinted):
    hints = judge("p", 1, [at(mode, 0.8)], threads).hints
    assert any("--threads 1" in hint for hint in hints) == hinted
    assert any("larger batches" in hint for hint in hints) == (mode.rows == 1)
    assert not any("repack" in hint for hint in hints), "there is no other exit to drop"


def test_a_point_without_early_exits_cannot_pay():
    assert "leaves nowhere early" in judge("full", 0, [at(TIGHT, 1.2)], threads=2).sentence


def test_who_pays_most_often_comes_first_and_among_equals_the_fastest():
    one, two, three = Verdict("a", "", (TIGHT,)), Verdict("b", "", (TIGHT, MANY)), Verdict("c", "", (TIGHT, MANY))
    assert [v.point for v in ranked([one, two, three], [9.0, 1.5, 2.0])] == ["c", "b", "a"]
