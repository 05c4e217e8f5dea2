"""Many clients at once: nobody's wait, deadline or departure is another's problem.

`slow` takes about a second for 1,024 rows, so that there is a while in which something runs.
"""

import asyncio
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest

LONG = np.random.default_rng(0).normal(size=(8192, 8)).round(2).tolist()  # many seconds: nobody waits for its end


@asynccontextmanager
async def something_long_running(server, client):
    """A long request that has left the queue and runs; it is cancelled at the end."""
    before = server.metric("queue_duration_seconds_count", block="0")
    long = asyncio.create_task(client.post("/v1/predict", json={"instances": LONG}))
    while server.metric("queue_duration_seconds_count", block="0") == before:
        assert not long.done()
        await asyncio.sleep(0.01)
    try:
        yield long
    finally:
        long.cancel()


def client_of(server):
    return httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None))


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def ask(client, rows, **options):
    return asyncio.create_task(client.post("/v1/predict", json={"instances": LONG[:rows], **options}))


@pytest.fixture
def busy(slow, serve):
    """Runs `scene(server, client, long)` while a long request occupies the only lane."""

    def play(scene, **settings):
        async def on_stage():
            async with client_of(server) as client, something_long_running(server, client) as long:
                await scene(server, client, long)

        with serve(slow, **settings) as server:
            asyncio.run(on_stage())

    return play


def test_probes_and_metrics_answer_while_thousands_of_rows_run(busy):
    async def scene(server, client, long):
        for path in ("/v2/health/live", "/v2/health/ready", "/metrics", "/", "/v1/operating-points"):
            assert (await client.get(path)).status_code == 200
        assert not long.done()

    busy(scene)


def test_the_queue_is_bounded_in_rows_not_in_requests(busy):
    async def scene(server, client, long):
        full = len(LONG)
        waiting = [ask(client, full - 30)]
        await until(lambda: server.metric("queue_rows", block="0") == full - 30)
        refused = await ask(client, 31)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert f"{full - 30} rows wait" in refused.json()["error"]
        waiting += [ask(client, 10) for _ in range(3)]
        await until(lambda: server.metric("queue_rows", block="0") == full)
        assert (await ask(client, 1)).status_code == 429
        assert not long.done()
        waiting.pop(0).cancel()
        long.cancel()
        assert [(await task).status_code for task in waiting] == [200, 200, 200]
        assert server.metric("requests_total", outcome="rejected") == 2

    busy(scene, max_queued_rows=len(LONG))


def test_a_deadline_that_passes_in_the_queue_is_503_while_the_other_still_runs(busy):
    async def scene(server, client, long):
        reply = await ask(client, 5, timeout=0.1)
        assert reply.status_code == 503
        assert "timeout" in reply.json()["error"]
        assert not long.done()
        assert server.metric("queue_rows", block="0") == 0
        long.cancel()
        assert (await ask(client, 1)).status_code == 200
        assert server.metric("requests_total", outcome="timeout") == 1
        assert server.metric("queue_duration_seconds_count", block="0") == 2  # the long one, the last one: it never ran

    busy(scene)


def test_a_deadline_that_passes_while_it_runs_is_503_and_frees_the_lane(slow, serve):
    with serve(slow) as server, server.client() as client:
        reply = client.post("/v1/predict", json={"instances": LONG, "timeout": 0.5})
        assert reply.status_code == 503
        assert client.post("/v1/predict", json={"instances": LONG[:1]}).status_code == 200
        assert server.metric("rows_total", operating_point="full") == 1


def test_clients_that_leave_the_queue_do_not_hurt_those_that_stay(busy):
    async def scene(server, client, long):
        tasks = [ask(client, 1) for _ in range(60)]
        await until(lambda: server.metric("queue_rows", block="0") == 60)
        for task in tasks[::2]:
            task.cancel()
        await until(lambda: server.metric("queue_rows", block="0") == 30)
        assert not long.done()
        long.cancel()
        replies = await asyncio.gather(*tasks[1::2])
        assert [reply.status_code for reply in replies] == [200] * 30
        assert (await ask(client, 3)).status_code == 200
        await until(lambda: server.metric("requests_total", outcome="cancelled") == 31)
        assert server.metric("rows_total", operating_point="full") == 33

    busy(scene)


def test_a_client_that_leaves_while_its_rows_run_stops_them(busy, slow):
    async def scene(server, client, long):
        long.cancel()
        assert (await ask(client, 1)).status_code == 200
        assert server.metric("requests_total", outcome="cancelled") == 1
        ran = sum(server.metric("flops_executed_total", block=str(k)) for k in range(2))
        assert ran < len(LONG) * slow.row_flops({"batch": 1})[-1]

    busy(scene)


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
