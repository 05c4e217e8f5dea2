"""Batches of many requests' rows, run by real graphs under the simulator's clock: each row has the answer that
`Cascade.predict` gives it alone, whatever it shared its batches with."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.server.operating_points import OperatingPoints
from offramp.server.protocols.tensors import group_of_arrays
from offramp.server.query import Query
from offramp.server.scheduling.choice import Ways
from offramp.server.scheduling.job import Job, Rows
from offramp.server.scheduling.padding import Padding
from offramp.server.scheduling.simulator import Simulation

FIELDS = ("label", "confidence", "score", "exit", "abstain", "flops", "involuntary", "log_odds")


class House:
    """A bundle's ways, and requests that go them."""

    def __init__(self, cascade, batching):
        self.cascade, self.points = cascade, OperatingPoints(cascade)
        self.padding = Padding(cascade.manifest)
        self.ways = Ways(self.points, self.padding, batching)

    def ask(self, groups, arrived=0.0, point="full", max_exit=None, probabilities=False, priority=5, deadline=None):
        last = len(self.points.exits) - 1
        rows = sum(len(g.positions) for g in groups)
        query = Query(
            tuple(groups), rows, point, last if max_exit is None else max_exit, probabilities,
            priority=priority, deadline=deadline,
        )  # fmt: skip
        cascade = self.points.cascade(point, query.max_exit)
        job = Job(query, cascade.route, SimpleNamespace(over=False), arrived)
        job.times = {}
        return job, self.ways.of(job, cascade)

    def waits(self, job):
        return [
            Rows(g.arrays, None, g.positions, self.padding.sizes(g.sizes), job.route.costs(g.sizes).exits)
            for g in job.query.groups
        ]

    def play(self, jobs, lanes=1):
        def told(job, ids, now):
            for row in ids.tolist():
                assert row not in job.times, "answered twice"
                job.times[row] = now

        simulation = Simulation(lanes, lambda batch, outcome, busy: 0.001 + 0.001 * batch.rows, told=told)
        for job, way in jobs:
            simulation.ask(job, way, self.waits(job))
        simulation.run()
        return simulation


def alone(cascade, job):
    """Each row's answer by itself."""
    last = len(cascade.exits) - 1
    point = job.query.operating_point
    at = cascade if point == cascade.operating_point.name else cascade.at(point)
    found = {name: [None] * job.rows for name in (*FIELDS, "probabilities")}
    for group in job.query.groups:
        for k, row in enumerate(group.positions.tolist()):
            inputs = {n: a[k : k + 1] for n, a in group.arrays.items()}
            limit = {} if job.query.max_exit == last else {"max_exit": job.query.max_exit}
            out = at.predict(inputs, fetch=("probabilities",), **limit)
            for name in found:
                found[name][row] = getattr(out, name)[0]
    return {name: np.array(values) for name, values in found.items()}


def same(job, expected):
    assert sorted(job.times) == list(range(job.rows))
    got = job.answers
    for name in ("label", "exit", "abstain", "flops"):
        assert getattr(got, name).tolist() == expected[name].tolist(), name
    np.testing.assert_allclose(got.score, expected["score"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.confidence, expected["confidence"], rtol=1e-4, atol=1e-5)
    if job.query.probabilities:
        np.testing.assert_allclose(got.probabilities, expected["probabilities"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batching", ["graph", "stages"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_rows_of_all_points_and_exits_share_batches_and_keep_their_answers(rows, batching, data):
    house = House(rows, batching)
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    jobs = []
    for _ in range(data.draw(st.integers(1, 12))):
        x = rng.normal(size=(data.draw(st.integers(1, 20)), 8)).astype(np.float32)
        if data.draw(st.booleans()):
            x[0, 0] = 3.4e37  # its logits are NaN
        jobs.append(
            house.ask(
                [group_of_arrays({"x": x}, rows.manifest)],
                arrived=data.draw(st.floats(0, 0.05)),
                point=data.draw(st.sampled_from(["full", "balanced", "fast"])),
                max_exit=data.draw(st.sampled_from([None, 0, 1, 2])),
                probabilities=data.draw(st.booleans()),
                priority=data.draw(st.integers(1, 9)),
            )
        )
    house.play(jobs, data.draw(st.integers(1, 3)))
    for job, _ in jobs:
        same(job, alone(rows, job))


@pytest.mark.parametrize("batching", ["graph", "stages"])
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_lengths_share_batches_and_keep_their_answers(tokens, batching, data):
    from offramp.runtime.points import OperatingPoint

    cascade = tokens.at(OperatingPoint((0.4, 0.5, float("-inf")), name="early"))
    house = House(cascade, batching)
    assert house.padding.allowed
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    jobs = []
    for _ in range(data.draw(st.integers(1, 10))):
        groups, before = [], 0
        for length in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)):
            count = data.draw(st.integers(1, 4))
            arrays = {"ids": rng.integers(0, 50, (count, length)), "mask": np.ones((count, length), np.int64)}
            group = group_of_arrays(arrays, cascade.manifest)
            groups.append(type(group)(group.arrays, group.sizes, group.positions + before))
            before += count
        jobs.append(house.ask(groups, arrived=data.draw(st.floats(0, 0.02)), point="early", probabilities=True))
    simulation = house.play(jobs, 2)
    for job, _ in jobs:
        assert sorted(job.times) == list(range(job.rows))
        expected = alone(cascade, job)
        np.testing.assert_allclose(job.answers.score, expected["score"], rtol=1e-3, atol=1e-4)
        near = np.abs(expected["score"] - np.array([0.4, 0.5, 9])[expected["exit"]]) < 1e-3
        for name in ("label", "exit", "flops"):
            assert (getattr(job.answers, name)[~near] == expected[name][~near]).all(), name
    assert simulation.dispatch.queued_rows == 0


def test_survivors_of_several_requests_meet_in_front_of_the_next_block(rows):
    house = House(rows, "stages")
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(6, 8)).astype(np.float32) for _ in range(12)]
    jobs = [house.ask([group_of_arrays({"x": x}, rows.manifest)], point="balanced") for x in xs]
    simulation = house.play(jobs)
    deep = [batch for _, _, batch in simulation.batches if batch.place.stage]
    assert deep
    assert max(len({id(part.waiting.owner) for part in batch.parts}) for batch in deep) > 1


def test_points_share_a_batch(rows):
    house = House(rows, "graph")
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    jobs = [
        house.ask([group_of_arrays({"x": x}, rows.manifest)], point=point, max_exit=j)
        for point in ("balanced", "fast")
        for j in (0, 1, None)
    ]
    simulation = house.play(jobs)
    assert len(simulation.batches) == 1
    for job, _ in jobs:
        same(job, alone(rows, job))
