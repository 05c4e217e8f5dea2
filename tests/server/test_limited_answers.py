"""Answers that come earlier than a row would have left by itself: a deadline, an overload, a last exit. All say so."""

import asyncio

import httpx
import numpy as np
import pytest
from offramp.server.settings import Settings

X = np.random.default_rng(3).normal(size=(64, 8)).round(2)


def predictions(client, rows=X, **options):
    reply = client.post("/v1/predict", json={"instances": rows.tolist(), **options})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture
def slow_blocks(slow_batches):
    slow_batches(0.15)


def test_a_deadline_gives_what_there_is_by_then_and_says_so(rows, serve, slow_blocks):
    with serve(rows) as server, server.client() as client:
        plain = predictions(client, operating_point="full")["predictions"]
        cut = predictions(client, operating_point="full", deadline_ms=200)["predictions"]
        assert {p["exit"] for p in plain} == {2}
        assert not any("involuntary" in p for p in plain)
        assert {p["exit"] for p in cut} <= {0, 1}
        assert all(p["involuntary"] for p in cut)
        whole = rows.at("full")
        at = [whole.predict({"x": X.astype(np.float32)}, max_exit=j).label for j in range(2)]
        assert [p["label"] for p in cut] == [int(at[p["exit"]][k]) for k, p in enumerate(cut)]
        assert server.metric("involuntary_total", reason="request") == len(X)


def test_a_deadline_that_has_passed_before_anything_ran_gives_the_first_exit(rows, serve, slow_blocks):
    with serve(rows) as server, server.client() as client:
        assert {p["exit"] for p in predictions(client, deadline_ms=0.001)["predictions"]} == {0}


def test_a_deadline_that_is_far_away_changes_nothing(rows, serve):
    with serve(rows) as server, server.client() as client:
        assert predictions(client)["predictions"] == predictions(client, deadline_ms=60_000)["predictions"]


@pytest.mark.parametrize("value", [0, -1, "soon"])
def test_a_deadline_that_is_none_is_named(client, value):
    reply = client.post("/v1/predict", json={"instances": X[:1].tolist(), "deadline_ms": value})
    assert reply.status_code == 400
    assert "deadline_ms" in reply.json()["error"]


def test_rows_cut_short_by_the_last_exit_they_may_reach_say_so(rows, client):
    cut = predictions(client, max_exit=0)["predictions"]
    expected = rows.predict({"x": X.astype(np.float32)}, max_exit=0)
    assert [p.get("involuntary", False) for p in cut] == expected.involuntary.tolist()


def test_open_inference_has_it_as_an_output_and_takes_the_deadline(rows_server, rows):
    tensor = {"name": "x", "shape": list(X.shape), "datatype": "FP32", "data": X.ravel().tolist()}
    with rows_server.client() as client:
        asked = {"inputs": [tensor], "outputs": [{"name": "involuntary"}], "parameters": {"max_exit": 0}}
        reply = client.post("/v2/models/rows/infer", json=asked).json()
        expected = rows.predict({"x": X.astype(np.float32)}, max_exit=0)
        assert reply["outputs"][0]["data"] == expected.involuntary.tolist()
        asked["parameters"] = {"deadline_ms": 60_000}
        assert client.post("/v2/models/rows/infer", json=asked).status_code == 200


def test_under_overload_requests_that_name_no_point_get_the_operators(rows, serve, slow_blocks):
    async def scene(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(**options):
                return (await client.post("/v1/predict", json={"instances": X.tolist(), **options})).json()

            waiting = [asyncio.create_task(ask(operating_point="full")) for _ in range(4)]
            while server.app.state.engine.queued_rows < 64:
                await asyncio.sleep(0.01)
            unnamed, named = await asyncio.gather(ask(), ask(operating_point="balanced"))
            await asyncio.gather(*waiting)
            return unnamed, named

    with serve(rows, overload_operating_point="fast", overload_rows=64, lanes=1) as server:
        unnamed, named = asyncio.run(scene(server))
        assert unnamed["operating_point"] == "fast"
        assert named["operating_point"] == "balanced"
        fast = rows.at("fast").predict({"x": X.astype(np.float32)})
        assert [p["exit"] for p in unnamed["predictions"]] == fast.exit.tolist()
        bars = np.array(rows.operating_points["balanced"].thresholds)[fast.exit]
        assert [p.get("involuntary", False) for p in unnamed["predictions"]] == (fast.score < bars).tolist()
        assert server.metric("involuntary_total", reason="overload") == (fast.score < bars).sum() > 0


def test_an_overload_point_that_the_bundle_lacks_is_named(rows, serve):
    from offramp.server import create_app

    with pytest.raises(ValueError, match="overload_operating_point is 'faster', expected one of"):
        create_app(rows, Settings.of(overload_operating_point="faster"))
