"""Who is next: deterministic, under a clock that the test sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.server.scheduling.dispatch import Dispatch
from offramp.server.scheduling.scheduler import HEAD_START, Place, Scheduler, Waiting
from offramp.server.scheduling.simulator import Asked, SimulatedWay, Simulation

COSTS = (1000, 1000, 1000)


def way_of(stages=False, costs=COSTS):
    return SimulatedWay(lambda sizes: [c * (sizes[0] if sizes else 1) for c in costs], stages=stages)


def rate(per_row=0.001, own=0.002):
    """A batch takes so long by itself, and so long for each row and stage that it goes through."""

    def seconds(batch, outcome, busy):
        size = batch.place.sizes[0] if batch.place.sizes else 1
        return own + per_row * size * sum(batch.place.way.through(batch)) / 3

    return seconds


def asked(at, rows=1, leaves=2, **options):
    return Asked(at, np.full(rows, leaves), **options)


def simulate(jobs, way=None, lanes=1, seconds=None, **options):
    way = way or way_of()
    simulation = Simulation(lanes, seconds or rate(), **options)
    for job in jobs:
        simulation.ask(job, way, [job.group()])
        if job.cancelled is not None:
            simulation.forget(job, job.arrived + job.cancelled)
    simulation.run()
    return simulation


def test_a_lone_row_starts_at_once():
    job = asked(1.0)
    simulation = simulate([job])
    assert simulation.batches[0][0] == 1.0
    assert job.answered == pytest.approx(1.003)


def test_rows_that_come_while_a_batch_runs_share_the_next_one():
    jobs = [asked(k * 0.0001) for k in range(9)]
    simulation = simulate(jobs)
    assert [batch.rows for _, _, batch in simulation.batches] == [1, 8]


def test_a_lone_row_does_not_wait_for_ten_thousand_that_came_before():
    long = asked(0.0, rows=10_000)
    lone = [asked(1.0 + k) for k in range(8)]
    simulation = simulate([long, *lone])
    longest = max(end - began for began, end, _ in simulation.batches)
    for job in lone:
        assert job.answered - job.arrived <= 2 * longest
    assert not np.isnan(long.answered)


def test_two_long_requests_take_turns():
    first, second = asked(0.0, rows=2000), asked(0.001, rows=2000)
    simulate([first, second])
    assert abs(first.answered - second.answered) < 0.2 * second.answered


def test_the_urgent_go_first_and_the_others_get_their_turn():
    jobs = [asked(0.0, rows=300, priority=p) for p in (9, 5, 1)]
    simulate(jobs)
    assert jobs[2].answered < jobs[1].answered < jobs[0].answered


def test_no_priority_starves_though_more_urgent_rows_come_than_can_be_run():
    patient = asked(0.0, priority=9)
    flood = [asked(k * 0.01, rows=20, priority=1) for k in range(2000)]  # twice of what can be run
    simulate([patient, *flood])
    assert patient.answered < 9 * HEAD_START + 1


def test_cancelled_rows_cost_nothing_more():
    staying, leaving = asked(0.0, rows=64), asked(0.001, rows=5000, cancelled=0.01)
    simulation = simulate([staying, leaving])
    ran = sum(p.stop - p.start for _, _, b in simulation.batches for p in b.parts if p.waiting.owner is leaving)
    assert ran <= 64
    assert np.isnan(leaving.answered)
    assert simulation.dispatch.queued_rows == 0


def test_a_full_queue_turns_away_and_says_when_to_come_back():
    jobs = [asked(0.0, rows=100), asked(0.0005, rows=100), asked(0.001, rows=1)]
    simulate(jobs, max_queued_rows=150)
    assert [job.refused for job in jobs] == [False, True, False]


def test_survivors_of_many_requests_meet_again_at_depth():
    jobs = [asked(k * 0.0001, rows=8, leaves=2 if k % 2 else 0) for k in range(64)]
    simulation = simulate(jobs, way_of(stages=True))
    deep = [batch for _, _, batch in simulation.batches if batch.place.stage == 2]
    assert sum(batch.rows for batch in deep) == 32 * 8
    assert max(len({id(part.waiting.owner) for part in batch.parts}) for batch in deep) > 1
    assert len(deep) < sum(1 for _, _, batch in simulation.batches if batch.place.stage == 0)


def test_survivors_are_not_left_behind_while_new_rows_keep_coming():
    early = asked(0.0)
    flood = [asked(0.0001 * k, rows=4, leaves=0) for k in range(4000)]
    simulate([early, *flood], way_of(stages=True))
    assert early.answered < 0.5


def test_lengths_share_a_batch_where_that_is_cheaper_than_another_batch():
    way = way_of()
    scheduler = Scheduler(lambda place: 8, worth=lambda way: 4000.0)
    for number, size in enumerate((10, 11, 30)):
        job = asked(number * 0.1, sizes=(size,))
        scheduler.add(Place(way, 0, (size,)), Waiting(job, 1, job.group(), due=job.arrived, since=job.arrived))
    batch = scheduler.take(1.0)
    assert (batch.rows, batch.place.sizes) == (2, (11,))
    assert scheduler.take(1.0).place.sizes == (30,)
    assert scheduler.take(1.0) is None
    assert len(scheduler) == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 2),  # arrival
            st.lists(st.integers(0, 2), min_size=1, max_size=40),  # where rows leave
            st.integers(1, 9),
            st.integers(1, 4),  # size
            st.none() | st.floats(0, 0.5),
        ),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_row_is_answered_exactly_once_or_its_client_has_left(requests, stages, lanes):
    way, counted = way_of(stages), {}
    jobs = [
        Asked(at, np.array(leaves), sizes=(size,), priority=priority, cancelled=cancelled)
        for at, leaves, priority, size, cancelled in requests
    ]
    run = way.run

    def counting(batch):
        outcome = run(batch)
        for job, ids in outcome.settled:
            counted.setdefault(id(job), []).extend(ids.tolist())
        return outcome

    way.run = counting
    simulation = simulate(jobs, way, lanes)
    for job in jobs:
        rows = sorted(counted.get(id(job), []))
        assert len(rows) == len(set(rows))
        if job.cancelled is None:
            assert rows == list(range(job.rows))
            assert (job.settled > job.arrived).all()
    assert simulation.dispatch.queued_rows == 0
    assert len(simulation.dispatch) == 0
    # Nothing of a request is begun once its client has left.
    for began, _, batch in simulation.batches:
        for part in batch.parts:
            job = part.waiting.owner
            assert job.cancelled is None or began <= job.arrived + job.cancelled
    # Nobody idles while somebody waits: with one lane the batches follow on each other.
    if lanes == 1 and not any(job.cancelled is not None for job in jobs):
        for (_, end, _), (began, _, _) in zip(simulation.batches, simulation.batches[1:], strict=False):
            assert began == end or any(job.arrived == began for job in jobs)


def test_requests_that_have_not_begun_are_counted():
    way, dispatch = way_of(), Dispatch(65_536)
    jobs = [asked(0.0, rows=rows) for rows in (1, 1, 200, 1)]
    for job in jobs:
        dispatch.admit(job, way, [job.group()])
    assert dispatch.queued_jobs == 4
    dispatch.forget(jobs[1])
    dispatch.forget(jobs[1])
    assert dispatch.queued_jobs == 3
    batch, begun = dispatch.take(0.0)
    assert batch.rows == 32
    assert dispatch.queued_jobs == 3 - len(begun)
    for job in jobs:
        dispatch.forget(job)
    assert dispatch.queued_jobs == dispatch.queued_rows == 0
