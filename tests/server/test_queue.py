"""Many clients at once: nobody's wait, deadline or departure is another's problem.

`slow` takes about a second for 1,024 rows.
"""

import asyncio
import threading
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from offramp.server.engine import BatchingEngine

LONG = np.random.default_rng(0).normal(size=(8192, 8)).round(2).tolist()  # many seconds: nobody waits for its end


class Lane:
    """The only lane of a server, held up in its first batch until `release`."""

    def __init__(self, monkeypatch):
        self._free, self.began = threading.Event(), threading.Event()
        run = BatchingEngine.run_batch

        def held(engine, batch):
            self.began.set()
            assert self._free.wait(60)
            return run(engine, batch)

        monkeypatch.setattr(BatchingEngine, "run_batch", held)

    def release(self):
        self._free.set()


@asynccontextmanager
async def something_that_runs(client, lane):
    """A request whose row has left the queue and runs."""
    running = asyncio.create_task(client.post("/v1/predict", json={"instances": LONG[:1]}))
    try:
        while not lane.began.is_set():
            assert not running.done()
            await asyncio.sleep(0.01)
        yield running
    finally:
        lane.release()
        running.cancel()


def client_of(server):
    return httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None))


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def ask(client, rows, **options):
    return asyncio.create_task(client.post("/v1/predict", json={"instances": LONG[:rows], **options}))


@pytest.fixture
def busy(slow, serve, monkeypatch):
    """Runs `scene(server, client, running, lane)` while a request occupies the only lane."""
    lane = Lane(monkeypatch)

    def play(scene, **settings):
        async def on_stage():
            async with client_of(server) as client, something_that_runs(client, lane) as running:
                await scene(server, client, running, lane)

        with serve(slow, lanes=1, **settings) as server:
            asyncio.run(on_stage())

    return play


def test_probes_and_metrics_answer_while_rows_run(busy):
    async def scene(server, client, running, lane):
        for path in ("/v2/health/live", "/v2/health/ready", "/metrics", "/", "/v1/operating-points"):
            assert (await client.get(path)).status_code == 200
        assert not running.done()

    busy(scene)


def test_the_queue_is_bounded_in_rows_not_in_requests(busy):
    async def scene(server, client, running, lane):
        waiting = [ask(client, 70)]
        await until(lambda: server.metric("queue_rows", block="0") == 70)
        refused = await ask(client, 31)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "70 rows wait" in refused.json()["error"]
        waiting += [ask(client, 10) for _ in range(3)]
        await until(lambda: server.metric("queue_rows", block="0") == 100)
        assert (await ask(client, 1)).status_code == 429
        assert not running.done()
        lane.release()
        assert [(await task).status_code for task in waiting] == [200] * 4
        assert server.metric("requests_total", outcome="rejected") == 2

    busy(scene, max_queued_rows=100)


def test_a_deadline_that_passes_in_the_queue_is_503_while_the_other_still_runs(busy):
    async def scene(server, client, running, lane):
        reply = await ask(client, 5, timeout=0.1)
        assert reply.status_code == 503
        assert "timeout" in reply.json()["error"]
        assert not running.done()
        assert server.metric("queue_rows", block="0") == 0
        lane.release()
        assert (await ask(client, 1)).status_code == 200
        assert server.metric("requests_total", outcome="timeout") == 1
        assert server.metric("queue_duration_seconds_count", block="0") == 2  # the first and the last: it never ran

    busy(scene)


def test_a_deadline_that_passes_while_it_runs_is_503_and_frees_the_lane(slow, serve):
    with serve(slow) as server, server.client() as client:
        reply = client.post("/v1/predict", json={"instances": LONG, "timeout": 0.5})
        assert reply.status_code == 503
        assert client.post("/v1/predict", json={"instances": LONG[:1]}).status_code == 200
        assert server.metric("rows_total", operating_point="full") == 1


def test_clients_that_leave_the_queue_do_not_hurt_those_that_stay(busy):
    async def scene(server, client, running, lane):
        tasks = [ask(client, 1) for _ in range(60)]
        await until(lambda: server.metric("queue_rows", block="0") == 60)
        for task in tasks[::2]:
            task.cancel()
        await until(lambda: server.metric("queue_rows", block="0") == 30)
        assert not running.done()
        lane.release()
        replies = await asyncio.gather(*tasks[1::2])
        assert [reply.status_code for reply in replies] == [200] * 30
        assert (await ask(client, 3)).status_code == 200
        await until(lambda: server.metric("requests_total", outcome="cancelled") == 30)
        assert (await running).status_code == 200
        assert server.metric("rows_total", operating_point="full") == 34

    busy(scene)


def test_a_client_that_leaves_while_its_rows_run_stops_them(slow, serve):
    async def scene(server):
        async with client_of(server) as client:
            long = ask(client, len(LONG))
            await until(lambda: server.metric("queue_duration_seconds_count", block="0"))
            long.cancel()
            assert (await ask(client, 1)).status_code == 200
            assert server.metric("requests_total", outcome="cancelled") == 1
            ran = sum(server.metric("flops_executed_total", block=str(k)) for k in range(2))
            assert ran < len(LONG) * slow.row_flops({"batch": 1})[-1]

    with serve(slow) as server:
        asyncio.run(scene(server))


def test_a_lone_row_is_answered_while_thousands_that_came_before_it_wait(slow, serve):
    async def scene(server):
        async with client_of(server) as client:
            long = ask(client, len(LONG))
            await until(lambda: server.metric("queue_duration_seconds_count", block="0"))
            assert (await ask(client, 1)).status_code == 200
            assert not long.done()
            long.cancel()

    with serve(slow) as server:
        asyncio.run(scene(server))


def test_two_hundred_clients_at_once_each_get_their_own_answer(rows, serve):
    x = np.random.default_rng(2).normal(size=(200, 3, 8)).astype(np.float32)

    async def scene(server):
        async with client_of(server) as client:
            return await asyncio.gather(
                *(client.post("/v1/predict", json={"instances": instances}) for instances in x.tolist())
            )

    with serve(rows, lanes=2) as server:
        replies = asyncio.run(scene(server))
        assert server.metric("rows_total", operating_point="balanced") == 600
    expected = rows.predict({"x": x.reshape(-1, 8)}).label.reshape(200, 3).tolist()
    assert [[p["label"] for p in reply.json()["predictions"]] for reply in replies] == expected


@pytest.mark.parametrize("settings", [{"max_rows_per_request": 10}, {"max_queued_rows": 10}])
def test_a_request_that_can_never_fit_is_413_and_not_come_again(rows, serve, settings):
    with serve(rows, **settings) as server, server.client() as client:
        assert client.post("/v1/predict", json={"instances": LONG[:10]}).status_code == 200
        reply = client.post("/v1/predict", json={"instances": LONG[:11]})
        assert reply.status_code == 413
        assert "11 rows" in reply.json()["error"]
        assert "retry-after" not in reply.headers
