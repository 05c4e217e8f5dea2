"""What was decided is served, by every engine and from the next row on; who leads shows what it rests on."""

import threading
from dataclasses import asdict

import numpy as np
import pytest
from asking import predict
from offramp.runtime.online.gauges import measure
from offramp.server.recalibration.follower import Follower
from prometheus_client.parser import text_string_to_metric_families


def label(client, answer, labels):
    rows = [{"request_id": answer["request_id"], "index": k, "label": int(one)} for k, one in enumerate(labels)]
    assert set(client.post("/v1/feedback", json={"labels": rows}).json()["outcomes"]) == {"accepted"}


def test_engines_that_share_a_store_serve_what_one_of_them_was_told(learns, eventually, put_in_force, x):
    with learns() as (one, cascade), learns() as (other, _), one.client() as here, other.client() as there:
        before = predict(there, x)["predictions"]
        assert not all(row["abstain"] for row in before)
        version = put_in_force(cascade)
        for client in (here, there):
            eventually(lambda client=client: all(row["abstain"] for row in predict(client, x)["predictions"]))
            assert client.get("/v1/recalibration").json()["version"] == version
        told = here.post("/v1/recalibration/rollback", json={"by": "Ada"}).json()
        assert (told["version"], told["decisions"][-1]["kind"], told["decisions"][-1]["by"]) == (0, "rollback", "Ada")
        assert predict(here, x)["predictions"] == predict(here, x)["predictions"]
        eventually(lambda: predict(there, x)["predictions"] == before)
        assert (
            there.post("/v1/recalibration/promote", json={"by": "Bo", "version": version}).json()["version"] == version
        )
        eventually(lambda: one.app.state.follower.leads or other.app.state.follower.leads)
        assert one.app.state.follower.leads != other.app.state.follower.leads


def test_rows_finish_on_the_version_they_began_with(learns, eventually, put_in_force, slow_batches, x):
    with learns() as (server, cascade), server.client() as client, server.client() as other:
        slow_batches(0.3)
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(predict(client, x)))
        waiting.start()
        eventually(lambda: server.app.state.engine.queued_rows == 0 and server.metric("batch_rows_count", block="0"))
        put_in_force(cascade)
        server.app.state.follower.look()
        assert cascade.recalibration.version == 1
        waiting.join()
        slow_batches(0.0)
        assert not all(row["abstain"] for row in answers[0]["predictions"])
        assert all(row["abstain"] for row in predict(other, x)["predictions"])
        cascade.recalibration.flush()
        assert cascade.recalibration.window("balanced").version.tolist() == [0] * len(x) + [1] * len(x)


def test_every_gauge_is_what_the_offline_functions_give(learns, eventually):
    rng = np.random.default_rng(0)
    with learns(shadow=0.5) as (server, cascade), server.client() as client:
        for _ in range(10):
            rows = rng.normal(size=(40, 8)).astype(np.float32)
            label(client, predict(client, rows), rng.integers(0, 5, 40))
        eventually(lambda: not server.app.state.keeping.running)
        cascade.recalibration.flush()
        server.app.state.follower.look(measure=True)
        expected = measure(cascade.recalibration.window("balanced"), cascade.calibration.point("balanced"))
        families = text_string_to_metric_families(client.get("/metrics").text)
        told = client.get("/v1/recalibration").json()["figures"]["balanced"]
    assert expected.labelled == 400
    assert 0 < expected.complete < 400
    found = {}
    for sample in (one for family in families for one in family.samples):
        if sample.labels.get("operating_point") == "balanced":
            key = sample.labels.get("exit") or sample.labels.get("coverage")
            found[sample.name.removeprefix("offramp_"), key] = sample.value
    for name in ("coverage", "selective_risk", "selective_risk_bound", "aurc"):
        assert found[name, None] == pytest.approx(getattr(expected, name), abs=1e-6, nan_ok=True), name
    for coverage, risk in expected.risk_at_coverage.items():
        assert found["risk_at_coverage", f"{coverage:g}"] == pytest.approx(risk, abs=1e-6)
    for name in ("confce_corr", "ece", "eefp"):
        for j, value in enumerate(getattr(expected, name)):
            assert found[name, str(j)] == pytest.approx(value, abs=1e-6, nan_ok=True), (name, j)
    assert told["labelled"] == 400
    assert told["ece"] == pytest.approx(list(asdict(expected)["ece"]), abs=1e-6)


def test_one_thread_looks_however_many_the_loop_has(learns, eventually, monkeypatch):
    looked, look = [], Follower.look

    def noted(self, **options):
        looked.append(threading.current_thread().name)
        return look(self, **options)

    monkeypatch.setattr(Follower, "look", noted)
    with learns() as (server, _), server.client() as client:
        # Feedback goes to the loop's own threads, of which there is another for each that comes meanwhile.
        eventually(lambda: client.post("/v1/feedback", json={"labels": []}) and len(looked) >= 3)
    assert len(set(looked)) == 1


def test_what_stops_it_from_learning_is_told_until_it_has_passed(learns, eventually, monkeypatch, caplog):
    def fails(self, **options):
        raise ArithmeticError("too large")

    with learns() as (server, _), server.client() as client:

        def alarm():
            return client.get("/v1/recalibration").json()["store"]["alarm"]

        assert alarm() is None
        with monkeypatch.context() as broken:
            broken.setattr(Follower, "look", fails)
            eventually(lambda: alarm() == "ArithmeticError('too large')")
        eventually(lambda: alarm() is None)
    assert caplog.text.count("too large") <= 2  # a log entry and its traceback, and not one a second


def test_who_follows_shows_no_figures(learns, x):
    with learns() as (one, _), learns() as (other, _), one.client() as client:
        label(client, predict(client, x), np.zeros(len(x), int))
        leader, follower = (one, other) if one.app.state.follower.leads else (other, one)
        leader.app.state.follower.look(measure=True)
        follower.app.state.follower.look(measure=True)
        assert leader.metric("labelled_rows", operating_point="balanced") == len(x)
        assert follower.metric("labelled_rows", operating_point="balanced") is None


def test_a_person_who_decides_gives_a_name(learns):
    with learns() as (server, _), server.client() as client:
        for path, body, said in (
            ("freeze", {}, "missing required field `by`"),
            ("freeze", {"by": " "}, "by is empty"),
            ("promote", {"by": "Ada", "version": 9}, "version is 9"),
            ("promote", {"by": "Ada"}, "missing required field `version`"),
            ("rollback", {"by": "Ada"}, "none before it"),
        ):
            reply = client.post(f"/v1/recalibration/{path}", json=body)
            assert (reply.status_code, said in reply.json()["error"]) == (400, True), reply.text
        assert client.post("/v1/recalibration/freeze", json={"by": "Ada"}).json()["frozen"] is True
        assert client.post("/v1/recalibration/freeze", json={"by": "Ada", "frozen": False}).json()["frozen"] is False
        assert client.get("/v1/recalibration?decisions=1").json()["decisions"][0]["kind"] == "unfreeze"
        assert client.get("/v1/recalibration?decisions=0").status_code == 400
        assert client.get("/v1/recalibration/nothing").status_code in (404, 405)
