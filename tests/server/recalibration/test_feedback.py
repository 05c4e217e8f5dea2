"""Labels over HTTP: rows are kept as they are answered, and labels find them."""

import msgspec
import numpy as np
import pytest
from asking import predict

OUTCOMES = ("accepted", "duplicate", "conflicting", "late", "unknown")


def feedback(client, body):
    reply = client.post("/v1/feedback", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["outcomes"]


@pytest.mark.parametrize("batching", ["auto", "stages"])
@pytest.mark.parametrize("point", ["balanced", "fast", "full"])
def test_what_every_exit_that_ran_said_is_kept_of_each_row(learns, x, point, batching):
    with learns(batching=batching) as (server, cascade), server.client() as client:
        whole = predict(client, x, operating_point=point)
        alone = [predict(client, x[k : k + 1], operating_point=point) for k in range(5)]
        cascade.recalibration.flush()
        window, records = cascade.recalibration.window(point), cascade.record({"x": x})
    # Rows are kept as they leave; what the first open exit says of a row tells which one it is.
    opened = np.array([*np.isfinite(cascade.calibration.point(point).thresholds[:-1]), True])
    answers = np.array(whole["predictions"] + [one["predictions"][0] for one in alone])
    numbers, first = np.array([*range(len(x)), *range(5)]), int(np.argmax(opened))
    answers, numbers = (those[np.argsort(records.score[first, numbers], kind="stable")] for those in (answers, numbers))
    order = np.argsort(window.score[first], kind="stable")
    exit, score, logits = window.exit[order], window.score[:, order], window.logits[:, order]
    assert exit.tolist() == [one["exit"] for one in answers]
    assert window.abstained[order].tolist() == [one["abstain"] for one in answers]
    assert window.served[order].tolist() == [one["label"] for one in answers]
    ran = (np.arange(3)[:, None] <= exit) & opened[:, None]
    assert np.isnan(score).tolist() == (~ran).tolist()
    assert np.allclose(score[ran], records.score[:, numbers][ran], atol=1e-4)
    gaps = records.logits[:, numbers] - records.logits[:, numbers].max(axis=2, keepdims=True)
    assert np.allclose(logits[ran], gaps[ran], atol=0.02)


def test_each_label_is_told_what_became_of_it_and_counted(learns, x):
    with learns() as (server, _), server.client() as client:
        answer = predict(client, x[:3])
        name = answer["request_id"]
        assert feedback(client, {"request_id": name, "label": 2}) == ["accepted"]
        assert feedback(client, {"request_id": name, "label": 'quote " \\'}) == ["duplicate"]
        many = [
            {"request_id": name, "index": 0, "label": 3},
            {"request_id": name, "index": 1, "label": "кот"},
            {"request_id": name, "index": 7, "label": 0},
            {"request_id": "nobody's", "label": 0},
        ]
        assert feedback(client, {"labels": many}) == ["conflicting", "accepted", "unknown", "unknown"]
        assert feedback(client, {"labels": []}) == []
        counted = {one: server.metric("feedback_total", outcome=one) for one in OUTCOMES}
    assert counted == {"accepted": 2, "duplicate": 1, "conflicting": 1, "late": 0, "unknown": 2}


def test_a_label_says_with_which_probability_it_was_sought(learns, x):
    with learns() as (server, cascade), server.client() as client:
        name = predict(client, x[:4])["request_id"]
        assert feedback(client, {"request_id": name, "index": 3, "label": 1, "asked": 0.25}) == ["accepted"]
        many = [
            {"request_id": name, "index": 0, "label": 1, "asked": 0.5},
            {"request_id": name, "index": 1, "label": 1},
        ]
        assert feedback(client, {"labels": many}) == ["accepted", "accepted"]
        again = {"request_id": name, "index": 0, "label": 1, "asked": 0.1}
        assert feedback(client, again) == ["duplicate"]
        window = cascade.recalibration.window("balanced")
    assert window.asked[window.known].tolist() == [0.5, 1.0, 0.25]
    assert window.weights[window.known].tolist() == [2.0, 1.0, 4.0]


def test_rows_of_every_protocol_are_kept_by_the_requests_name(learns, x):
    tensor = {"name": "x", "shape": [2, 8], "datatype": "FP32", "data": x[:2].ravel().tolist()}
    lines = {"Accept": "application/x-ndjson", "X-Request-ID": "lines"}
    with learns() as (server, _), server.client() as client:
        answer = client.post("/v2/models/rows/infer", json={"inputs": [tensor]}, headers={"X-Request-ID": "v2"})
        assert answer.headers["X-Request-ID"] == "v2"
        client.post("/v1/predict", json={"instances": x[:4].tolist()}, headers=lines)
        labels = [{"request_id": "v2", "index": 1, "label": 0}, {"request_id": "lines", "index": 3, "label": 4}]
        assert feedback(client, {"labels": labels}) == ["accepted", "accepted"]


def test_what_no_threshold_has_decided_isnt_kept_nor_is_who_would_have_left_anyway(learns, x):
    high = np.full((1, 8), 1e38, np.float32)
    with learns() as (server, cascade), server.client() as client:
        cut = predict(client, x, max_exit=0)
        predict(client, high)
        cascade.recalibration.flush()
        assert 0 < sum(one.get("involuntary", False) for one in cut["predictions"]) < len(x)
        assert len(cascade.recalibration.window("balanced")) == 0
        whole = predict(client, x, max_exit=2)
        cascade.recalibration.flush()
        assert not any(one.get("involuntary", False) for one in whole["predictions"])
        assert len(cascade.recalibration.window("balanced")) == len(x)


def test_all_that_is_kept_of_a_request_can_be_deleted(learns, x):
    with learns() as (server, cascade), server.client() as client:
        name = predict(client, x)["request_id"]
        assert client.delete(f"/v1/feedback/{name}").json() == {"rows": len(x)}
        assert client.delete(f"/v1/feedback/{name}").json() == {"rows": 0}
        assert feedback(client, {"request_id": name, "label": 0}) == ["unknown"]
        assert len(cascade.recalibration.window("balanced")) == 0


@pytest.mark.parametrize("name", ["pod-7/A+b9==", "0-9_A.z:1", "x" * 200])
def test_a_name_that_the_client_chose_is_its_rows_name_to_the_end(learns, x, name):
    with learns() as (server, _), server.client() as client:
        sent = client.post("/v1/predict", json={"instances": x[:2].tolist()}, headers={"X-Request-ID": name})
        assert sent.json()["request_id"] == name
        assert feedback(client, {"request_id": name, "label": 0}) == ["accepted"]
        assert client.delete(f"/v1/feedback/{name}").json() == {"rows": 2}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "request_id is missing"),
        ({"request_id": "a"}, "label is missing"),
        ({"request_id": "a", "label": 1, "labels": []}, "labels stands beside"),
        ({"request_id": "a", "label": True}, "got `bool`"),
        ({"request_id": "a", "label": None}, "Expected `int | str`, got `null`"),
        ({"request_id": "a", "label": 5}, "label is 5, expected 0…4."),
        ({"request_id": "a", "label": -1}, "label is -1, expected 0…4."),
        (
            {"request_id": "a", "label": "six"},
            "label is 'six', which is none of the 5 classes: expected a name",
        ),
        ({"request_id": "a", "label": ""}, "label is '', which is none of the 5 classes"),
        ({"request_id": "", "label": 1}, "request_id is '', 0 characters"),
        ({"request_id": "a" * 201, "label": 1}, "201 characters: expected 1 to 200"),
        ({"request_id": "a", "label": 1, "index": -1}, "index is -1"),
        ({"request_id": "a", "label": 1, "asked": 0}, "asked is 0"),
        ({"labels": [{"request_id": "a", "label": 1}, {"request_id": "a", "label": -1}]}, "labels[1] is -1, expected"),
        ({"labels": [{"request_id": "", "label": 1}]}, "labels[0].request_id is ''"),
        ({"labels": [{"request_id": "a", "label": 1, "asked": 1.5}]}, "labels[0].asked is 1.5"),
        ({"request_id": "a", "label": 1, "row": 1}, "unknown field `row`"),
        ({"labels": [{"request_id": "a", "label": 1}, {"request_id": "a"}]}, "missing required field `label`"),
        ([], "Expected `object`"),
    ],
)
def test_a_label_that_is_none_is_told_what_is_wrong_with_it(learns, body, said):
    with learns() as (server, _), server.client() as client:
        reply = client.post("/v1/feedback", json=body)
    assert reply.status_code == 400
    assert said in reply.json()["error"]
    if "labels" not in body:
        assert "labels[" not in reply.json()["error"]


def test_a_label_of_any_length_is_told_in_few_words(learns):
    with learns() as (server, _), server.client() as client:
        reply = client.post("/v1/feedback", json={"request_id": "a", "label": "x" * 100_000})
    assert reply.status_code == 400
    assert len(reply.json()["error"]) < 300


def test_a_server_that_keeps_nothing_says_so(client):
    for method, path in (("POST", "/v1/feedback"), ("GET", "/v1/recalibration"), ("POST", "/v1/recalibration/freeze")):
        reply = client.request(method, path, content=msgspec.json.encode({}))
        assert reply.status_code == 501
        assert "--recalibration" in reply.json()["error"]
