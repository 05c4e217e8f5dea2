"""Rows that leave early are there early."""

import asyncio

import numpy as np
import pytest
from offramp.server.engine import BatchingEngine
from offramp.server.errors import DeadlinePassed
from offramp.server.metrics import Metrics
from offramp.server.operating_points import OperatingPoints
from offramp.server.patience import Attended, Patience
from offramp.server.protocols.streaming import Stream
from offramp.server.protocols.tensors import group_of_arrays
from offramp.server.query import Query
from starlette.requests import Request

X = np.random.default_rng(4).normal(size=(300, 8)).astype(np.float32)


def played(cascade, scene, **options):
    async def on_stage():
        points = OperatingPoints(cascade)
        engine = BatchingEngine(points, Metrics(cascade.manifest, points.points), **options)
        try:
            return await scene(engine)
        finally:
            await engine.close(5)

    return asyncio.run(on_stage())


def query(cascade, x=X, point="balanced", **options):
    return Query((group_of_arrays({"x": x}, cascade.manifest),), len(x), point, 2, **options)


@pytest.mark.parametrize("batching", ["graph", "stages"])
def test_every_row_comes_once_with_its_answer_and_early_ones_before_the_last(rows, batching):
    async def scene(engine):
        stream = Stream(engine, query(rows, probabilities=True), Patience(60))
        return [(ids, answer) async for ids, answer in stream], stream.whole

    parts, whole = played(rows, scene, batching=batching)
    assert len(parts) > 1
    ids = np.concatenate([ids for ids, _ in parts])
    assert sorted(ids.tolist()) == list(range(len(X)))
    expected = rows.at("balanced").predict({"x": X}, fetch=("probabilities",))
    for name in ("label", "exit", "abstain", "flops"):
        got = np.concatenate([getattr(answer, name) for _, answer in parts])
        assert got.tolist() == getattr(expected, name)[ids].tolist()
        assert getattr(whole, name).tolist() == getattr(expected, name).tolist()
    confidence = np.concatenate([answer.confidence for _, answer in parts])
    np.testing.assert_allclose(confidence, expected.confidence[ids], atol=1e-6)
    probabilities = np.concatenate([answer.probabilities for _, answer in parts])
    np.testing.assert_allclose(probabilities, expected.probabilities[ids], atol=1e-6)


def test_who_stops_looking_cancels_the_rest(rows):
    async def scene(engine):
        stream = Stream(engine, query(rows, np.tile(X, (20, 1))), Patience(60))
        looking = aiter(stream)
        await anext(looking)
        await looking.aclose()
        return engine.queued_rows

    assert played(rows, scene) == 0


def test_a_timeout_is_raised_behind_what_was_there(rows, slow_batches):
    slow_batches(0.1)

    async def scene(engine):
        seen, patience = [0], Patience(0.35)

        async def look():
            with Attended(Request({"type": "http", "headers": []}), patience):
                async for ids, _ in Stream(engine, query(rows), patience):
                    seen[0] += len(ids)

        with pytest.raises(DeadlinePassed):
            await look()
        return seen[0]

    assert 0 < played(rows, scene, lanes=1) < len(X)


def test_what_a_deadline_leaves_over_comes_at_its_end(rows, slow_batches):
    slow_batches(0.05)

    async def scene(engine):
        stream = Stream(engine, query(rows, point="full", deadline=0.01), Patience(60))
        return [(ids, answer) async for ids, answer in stream]

    parts = played(rows, scene, lanes=1)
    assert sorted(np.concatenate([ids for ids, _ in parts]).tolist()) == list(range(len(X)))
    assert all(answer.involuntary.all() for _, answer in parts)


def test_no_rows_are_no_parts(rows):
    async def scene(engine):
        return [part async for part in Stream(engine, query(rows, X[:0]), Patience(60))]

    assert played(rows, scene) == []
