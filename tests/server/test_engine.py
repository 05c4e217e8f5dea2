"""The engine by itself."""

import asyncio
import threading

import numpy as np
import pytest
from offramp.server.engine import BatchingEngine
from offramp.server.errors import Unavailable
from offramp.server.metrics import Metrics
from offramp.server.operating_points import OperatingPoints
from offramp.server.patience import Patience
from offramp.server.protocols.tensors import group_of_arrays
from offramp.server.query import DEFAULT_PRIORITY, Query
from offramp.server.scheduling.dispatch import Dispatch
from offramp.server.scheduling.speed import Speed


@pytest.fixture
def engine_of():
    def make(cascade, **options):
        return BatchingEngine(OperatingPoints(cascade), Metrics(cascade.manifest), **options)

    return make


def query(cascade, rows, priority=DEFAULT_PRIORITY):
    x = np.zeros((rows, 8), np.float32)
    return Query((group_of_arrays({"x": x}, cascade.manifest),), rows, "full", 1, priority=priority)


def test_closing_answers_what_is_here_and_refuses_what_comes(slow, engine_of):
    async def scene():
        engine = engine_of(slow)
        assert engine.ready
        tasks = [asyncio.create_task(engine.infer(query(slow, 50), Patience(60))) for _ in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        assert not engine.ready
        with pytest.raises(Unavailable):
            await engine.infer(query(slow, 1), Patience(60))
        await closing
        assert [len(await task) for task in tasks] == [50, 50, 50]

    asyncio.run(scene())


def test_an_error_in_one_query_leaves_the_lane_alive(rows, tokens, engine_of):
    async def scene():
        engine = engine_of(tokens)
        strange = {"ids": np.full((1, 2), 10**6), "mask": np.ones((1, 2), np.int64)}
        good = {"ids": np.ones((1, 2), np.int64), "mask": np.ones((1, 2), np.int64)}
        asked = [Query((group_of_arrays(arrays, tokens.manifest),), 1, "full", 2) for arrays in (strange, good)]
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await engine.infer(asked[0], Patience(60))
        assert len(await engine.infer(asked[1], Patience(60))) == 1
        await engine.close()

    asyncio.run(scene())


def test_an_engine_that_nobody_asked_closes_at_once(rows, engine_of):
    asyncio.run(engine_of(rows).close())


@pytest.mark.parametrize("leaves", ["by its time", "by its caller"])
def test_whoever_leaves_frees_the_lane_after_a_batch(slow, engine_of, leaves):
    async def scene():
        engine = engine_of(slow)
        long = asyncio.create_task(engine.infer(query(slow, 16_000), Patience(0.3 if leaves == "by its time" else 60)))
        await asyncio.sleep(0.3)
        if leaves == "by its caller":
            long.cancel()
        assert len(await engine.infer(query(slow, 1), Patience(60))) == 1
        long.cancel()
        await engine.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_what_is_not_answered_within_the_time_to_close_is_refused_running_and_waiting_alike(slow, engine_of):
    async def scene():
        engine = engine_of(slow)
        tasks = [asyncio.create_task(engine.infer(query(slow, 16_000), Patience(600))) for _ in range(3)]
        await asyncio.sleep(0)
        await engine.close(0.2)
        assert [type(found) for found in await asyncio.gather(*tasks, return_exceptions=True)] == [Unavailable] * 3
        await engine.close(0.2)

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("most", [0, 4, 1000], ids=["nothing is short", "four rows are", "all is short"])
def test_only_what_is_short_runs_in_the_event_loop(rows, engine_of, monkeypatch, most):
    here, run = [], BatchingEngine.run_batch

    def noted(self, batch):
        here.append((batch.rows, threading.current_thread() is threading.main_thread()))
        return run(self, batch)

    monkeypatch.setattr(BatchingEngine, "run_batch", noted)
    most_flops = most * int(rows.row_flops({})[-1])
    monkeypatch.setattr(Speed, "expected_seconds", lambda self, way, flops: 0.0 if flops <= most_flops else 1.0)
    monkeypatch.setattr(Speed, "rows_at_once", lambda self, place, row_flops: 1000)  # however busy the machine is
    x = np.random.default_rng(0).normal(size=(1, 8)).astype(np.float32)

    async def scene():
        engine = engine_of(rows)
        asked = Query((group_of_arrays({"x": x}, rows.manifest),), 1, "full", 2)
        await engine.infer(asked, Patience(60))  # the lanes start, and look for work by themselves
        await asyncio.sleep(0.2)
        here.clear()
        answers = [await engine.infer(asked, Patience(60))]
        answers += await asyncio.gather(*(engine.infer(asked, Patience(60)) for _ in range(20)))
        await engine.close()
        assert {int(answer.label[0]) for answer in answers} == {int(rows.at("full").predict({"x": x}).label[0])}

    asyncio.run(scene())
    assert here[0] == (1, most > 0)
    assert sum(count for count, _ in here) == 21
    assert all(loop == (most == 1000) for _, loop in here[1:])
    if most == 1000:
        assert here[1:] == [(20, True)]


@pytest.mark.parametrize(("requests", "each", "here"), [(60, 1, True), (1, 60, False)], ids=["of many", "of one"])
def test_rows_that_take_less_than_their_requests_run_in_the_event_loop(
    rows, engine_of, monkeypatch, requests, each, here
):
    seen, run = [], BatchingEngine.run_batch

    def noted(self, batch):
        seen.append((batch.rows, threading.current_thread() is threading.main_thread()))
        return run(self, batch)

    monkeypatch.setattr(BatchingEngine, "run_batch", noted)
    row_flops = int(rows.row_flops({})[-1])
    monkeypatch.setattr(Speed, "expected_seconds", lambda self, way, flops: 1e-4 * flops / row_flops)
    monkeypatch.setattr(Speed, "rows_at_once", lambda self, place, row_flops: 1000)  # however busy the machine is

    async def scene():
        engine = engine_of(rows)
        await engine.infer(query(rows, 1), Patience(60))
        await asyncio.sleep(0.2)
        seen.clear()
        await asyncio.gather(*(engine.infer(query(rows, each), Patience(60)) for _ in range(requests)))
        await engine.close()

    asyncio.run(scene())
    assert sum(count for count, _ in seen) == 60
    assert {loop for _, loop in seen} == {here}


@pytest.mark.parametrize("stays", [True, False], ids=["who waits", "nobody waits any more"])
def test_short_rows_that_came_behind_long_ones_are_given_back_to_the_event_loop(rows, engine_of, monkeypatch, stays):
    seen, run, begun, may_end = [], BatchingEngine.run_batch, threading.Event(), threading.Event()

    def noted(self, batch):
        here = threading.current_thread() is threading.main_thread()
        seen.append((batch.rows, here))
        if batch.rows > 4:
            begun.set()
            assert not here
            assert may_end.wait(60)
        return run(self, batch)

    row_flops = int(rows.row_flops({})[-1])
    monkeypatch.setattr(Speed, "expected_seconds", lambda self, way, flops: 1.0 if flops > 4 * row_flops else 0.0)
    monkeypatch.setattr(Speed, "rows_at_once", lambda *_: 100)

    async def scene():
        engine = engine_of(rows)
        await engine.infer(query(rows, 1), Patience(60))
        await asyncio.sleep(0.2)  # the lane looks for work by itself when it starts
        monkeypatch.setattr(BatchingEngine, "run_batch", noted)
        long = asyncio.ensure_future(engine.infer(query(rows, 60), Patience(60)))
        await asyncio.to_thread(begun.wait, 60)
        short = [asyncio.ensure_future(engine.infer(query(rows, 1), Patience(60))) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert seen == [(60, False)]
        may_end.set()
        if not stays:
            for one in short:
                one.cancel()
        done = await asyncio.gather(long, *short, return_exceptions=True)
        assert sum(isinstance(one, asyncio.CancelledError) for one in done) == (0 if stays else 3)
        assert len(await engine.infer(query(rows, 2), Patience(60))) == 2
        await engine.close()

    asyncio.run(asyncio.wait_for(scene(), 60))
    given_back = [(3, True)] if stays else []
    assert seen == [(60, False), *given_back, (2, True)]


def test_an_error_of_a_row_in_the_event_loop_is_that_rows_alone(tokens, engine_of, monkeypatch):
    monkeypatch.setattr(Speed, "expected_seconds", lambda *_: 0.0)

    async def scene():
        engine = engine_of(tokens)
        strange = {"ids": np.full((1, 2), 10**6), "mask": np.ones((1, 2), np.int64)}
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await engine.infer(Query((group_of_arrays(strange, tokens.manifest),), 1, "full", 2), Patience(60))
        good = {"ids": np.ones((1, 2), np.int64), "mask": np.ones((1, 2), np.int64)}
        assert (
            len(await engine.infer(Query((group_of_arrays(good, tokens.manifest),), 1, "full", 2), Patience(60))) == 1
        )
        await engine.close()

    asyncio.run(scene())


@pytest.mark.parametrize("place", [0, 3, 7], ids=["in front", "in the middle", "behind"])
def test_a_row_that_fails_fails_for_itself_wherever_it_stands_in_a_batch(tokens, engine_of, monkeypatch, place):
    monkeypatch.setattr(Speed, "expected_seconds", lambda *_: 1.0)  # in lanes, together
    mask = np.ones((1, 2), np.int64)
    asked = [Query((group_of_arrays({"ids": mask, "mask": mask}, tokens.manifest),), 1, "full", 2) for _ in range(8)]
    strange = {"ids": np.full((1, 2), 10**6), "mask": mask}
    asked[place] = Query((group_of_arrays(strange, tokens.manifest),), 1, "full", 2)

    async def scene():
        engine = engine_of(tokens)
        for _ in range(3):
            found = await asyncio.gather(*(engine.infer(one, Patience(60)) for one in asked), return_exceptions=True)
            assert [isinstance(one, ValueError) for one in found] == [k == place for k in range(8)]
        assert engine.ready
        assert engine.queued_rows == 0
        await engine.close()

    asyncio.run(scene())


@pytest.mark.parametrize("here", [True, False], ids=["in the event loop", "in a lane"])
def test_whatever_goes_wrong_around_a_batch_the_next_one_runs(rows, engine_of, monkeypatch, here):
    monkeypatch.setattr(Speed, "expected_seconds", lambda *_: 0.0 if here else 1.0)
    ran, broken = Dispatch.ran, [3]

    def fails_at_first(self, *arguments, **options):
        if broken[0]:
            broken[0] -= 1
            raise LookupError("by accident")
        return ran(self, *arguments, **options)

    monkeypatch.setattr(Dispatch, "ran", fails_at_first)
    x = np.zeros((1, 8), np.float32)

    async def scene():
        engine = engine_of(rows)
        asked = Query((group_of_arrays({"x": x}, rows.manifest),), 1, "full", 2)
        for _ in range(3):
            with pytest.raises(LookupError, match="by accident"):
                await engine.infer(asked, Patience(60))
        assert len(await engine.infer(asked, Patience(60))) == 1
        assert engine.ready
        await engine.close()

    asyncio.run(scene())


def test_an_engine_whose_batch_does_not_end_is_not_ready_until_it_does(rows, engine_of, monkeypatch):
    free, run = threading.Event(), BatchingEngine.run_batch

    def held(self, batch):
        assert free.wait(60)
        return run(self, batch)

    monkeypatch.setattr(BatchingEngine, "run_batch", held)

    async def scene():
        engine = engine_of(rows, stalled_after=0.05)
        assert engine.ready
        x = np.zeros((1, 8), np.float32)
        asking = asyncio.create_task(
            engine.infer(Query((group_of_arrays({"x": x}, rows.manifest),), 1, "full", 2), Patience(60))
        )
        async with asyncio.timeout(60):
            while engine.ready:
                await asyncio.sleep(0.01)
        free.set()
        await asking
        assert engine.ready
        await engine.close()

    asyncio.run(scene())
