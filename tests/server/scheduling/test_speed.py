"""How many rows make a batch."""

import math

import pytest
from offramp.server.scheduling.scheduler import Place
from offramp.server.scheduling.simulator import SimulatedWay
from offramp.server.scheduling.speed import AT_MOST, Speed

WAY = SimulatedWay(lambda sizes: [1], stages=False)
PLACE = Place(WAY, 0, ())


@pytest.mark.parametrize(
    ("row_flops", "rows"),
    [(0, 32), (1, 32), (10**8, 32), (10**9, 8), (12 * 10**9, 1), (10**15, 1)],
)
def test_the_first_batch_is_bounded_by_its_flops_not_only_by_its_rows(row_flops, rows):
    assert Speed().rows_at_once(PLACE, row_flops) == rows


@pytest.mark.parametrize(
    ("row_flops", "rows"),
    [
        (1, AT_MOST),
        (10**6, AT_MOST),
        (10**8, 25),  # 25 ms at 100 GFLOP/s
        (10**9, 8),  # a few that take longer
        (10**10, 2),
        (10**12, 1),
    ],
)
def test_a_batch_takes_as_long_as_others_may_wait_for_it(row_flops, rows):
    speed = Speed()
    speed.ran(PLACE, 10, 10**9, 0.1)
    assert speed.rows_at_once(PLACE, row_flops) == rows


def test_what_a_batch_is_worth_is_the_time_it_takes_beside_its_rows():
    speed = Speed()
    for rows in range(1, 60):
        speed.ran(PLACE, rows, 10**6, 0.01 + rows * 0.001)
    assert 0 < speed.worth(WAY) < 10 * 10**6


def test_batches_of_one_size_say_nothing_about_that():
    speed = Speed()
    for _ in range(60):
        speed.ran(PLACE, 8, 10**6, 0.01)
    assert speed.worth(WAY) == 0


def test_who_comes_again_later_is_told_when():
    speed = Speed()
    assert speed.seconds_for(1000) == 1
    speed.answered(100, 0.5)
    assert speed.seconds_for(1000) == pytest.approx(5)
    assert speed.seconds_for(10**9) == 60


def test_nothing_is_known_before_anything_ran():
    assert Speed().expected_seconds(WAY, 1) == math.inf


def test_what_lanes_took_says_nothing_of_the_event_loop_once_that_ran_some():
    speed = Speed()
    speed.ran(PLACE, 8, 10, 0.004)
    assert speed.expected_seconds(WAY, 80) == pytest.approx(0.004)
    speed.ran(PLACE, 8, 10, 0.0004, undisturbed=True)
    for _ in range(20):
        speed.ran(PLACE, 8, 10, 0.005)
    assert speed.expected_seconds(WAY, 80) == pytest.approx(0.0004, rel=0.03)
    assert speed.expected_seconds(WAY, 800) == pytest.approx(0.004, rel=0.03)


def test_one_odd_batch_is_no_reason_to_leave_the_event_loop():
    speed = Speed()
    for k in range(50):
        speed.ran(PLACE, 1, 10, 0.5 if k == 30 else 0.0002, undisturbed=True)
        assert speed.expected_seconds(WAY, 10) < 0.00025
    for _ in range(50):
        speed.ran(PLACE, 1, 10, 0.002, undisturbed=True)
    assert speed.expected_seconds(WAY, 10) == pytest.approx(0.002, rel=0.05)


def test_what_went_to_lanes_is_tried_again_some_time():
    speed = Speed()
    speed.ran(PLACE, 1, 10, 0.02, undisturbed=True)
    for _ in range(4000):
        speed.ran(PLACE, 1, 10, 0.02)
    assert speed.expected_seconds(WAY, 10) < 0.0005
