"""Rows that left early are run to the end after they were answered, when nobody else waits."""

import sqlite3

import numpy as np
from asking import predict


def settle(server, cascade, eventually):
    """All that was begun is done and on the disk."""
    eventually(lambda: not server.app.state.keeping.running)
    cascade.recalibration.flush()


def test_rows_of_a_shadow_run_have_all_exits_known_and_say_with_which_probability(learns, eventually, x):
    with learns(shadow=1.0) as (server, cascade), server.client() as client:
        answer = predict(client, x)
        settle(server, cascade, eventually)
        window, records = cascade.recalibration.window("balanced"), cascade.record({"x": x})
        server.app.state.follower.look()
        ran = server.metric("shadow_rows_total")
    early = sum(one["exit"] < 2 for one in answer["predictions"])
    assert 0 < early < len(x)
    assert window.complete.all()
    assert window.shadow.tolist() == [1.0] * len(x)
    order, mine = np.argsort(window.score[0]), np.argsort(records.score[0])
    assert np.allclose(window.score[:, order], records.score[:, mine], atol=1e-4)
    assert ran == early


def test_the_share_is_that_of_the_rows_that_left_early(learns, eventually):
    rows = np.random.default_rng(1).normal(size=(2000, 8)).astype(np.float32)
    with learns(shadow=0.25) as (server, cascade), server.client() as client:
        predict(client, rows)
        settle(server, cascade, eventually)
        window = cascade.recalibration.window("balanced")
    early = window.exit < 2
    assert set(window.shadow[early]) == {0.25}
    assert set(window.shadow[~early]) == {1.0}
    assert window.complete[~early].all()
    # Five standard errors of a share of a quarter.
    assert abs(window.complete[early].mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / early.sum())


def test_shadow_runs_are_no_requests(learns, eventually, x):
    with learns(shadow=1.0) as (server, cascade), server.client() as client:
        predict(client, x)
        settle(server, cascade, eventually)
        assert server.metric("requests_total", outcome="ok") == 1
        assert server.metric("rows_total", operating_point="balanced") == len(x)
        assert server.metric("queue_duration_seconds_count", block="0") == 1
        executed = sum(server.metric("flops_executed_total", block=str(k)) for k in range(3))
        assert executed > server.metric("flops_total", operating_point="balanced")


def test_a_server_that_stops_gives_up_its_shadow_runs(learns, kept, slow_batches, x):
    slow_batches(0.3)
    with learns(shadow=1.0, lanes=1, drain_timeout=20) as (server, _), server.client() as client:
        predict(client, x)
    with sqlite3.connect(kept) as store:  # outside `with` it has stopped
        rows, complete = store.execute("SELECT count(*), sum(complete) FROM served").fetchone()
    assert rows == len(x)
    assert complete < rows


def test_answers_go_on_while_nothing_can_be_kept(learns, kept, eventually, x):
    with learns() as (server, cascade), server.client() as client:
        predict(client, x)
        cascade.recalibration.close()  # as a disk that is gone
        assert len(predict(client, x)["predictions"]) == len(x)
        reply = client.post("/v1/feedback", json={"request_id": "a", "label": 0})
        assert reply.status_code == 503
        assert str(kept) not in reply.text
        assert cascade.recalibration.dropped == len(x)
