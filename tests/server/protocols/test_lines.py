"""`Accept: application/x-ndjson`: a line a row, as rows leave."""

import json
import socket
import time

import numpy as np
import pytest

X = np.random.default_rng(6).normal(size=(60, 8)).round(3)
LINES = {"Accept": "application/x-ndjson"}


@pytest.fixture
def slow_blocks(slow_batches):
    slow_batches(0.2)


def test_the_lines_are_the_predictions_with_their_index(client):
    asked = {"instances": X.tolist(), "probabilities": True}
    plain = client.post("/v1/predict", json=asked).json()["predictions"]
    reply = client.post("/v1/predict", json=asked, headers=LINES)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.headers["x-request-id"]
    lines = sorted((json.loads(line) for line in reply.text.splitlines()), key=lambda line: line["index"])
    assert [line.pop("index") for line in lines] == list(range(len(X)))
    assert {line.pop("operating_point") for line in lines} == {"balanced"}
    for line, one in zip(lines, plain, strict=True):
        np.testing.assert_allclose(line.pop("probabilities"), one.pop("probabilities"), atol=1e-5)
        assert line.pop("confidence") == pytest.approx(one.pop("confidence"), abs=1e-5)
        assert line == one


def test_rows_that_leave_early_are_there_before_the_others_have_been_run(rows, serve, slow_blocks):
    with (
        serve(rows, batching="stages", lanes=1) as server,
        server.client() as client,
        client.stream("POST", "/v1/predict", json={"instances": X.tolist()}, headers=LINES) as reply,
    ):
        came = [(time.monotonic(), json.loads(line)["exit"]) for line in reply.iter_lines()]
    first, last = came[0][0], came[-1][0]
    assert sorted(exit for _, exit in came) == sorted(rows.predict({"x": X.astype(np.float32)}).exit.tolist())
    assert first < last
    assert came[0][1] == 0


def test_no_instances_are_no_lines(client):
    reply = client.post("/v1/predict", json={"instances": []}, headers=LINES)
    assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize("body", [b"{", b'{"instances": [[1]]}', b'{"instances": [[1,2,3,4,5,6,7,8]], "max_exit": 9}'])
def test_what_is_wrong_from_the_start_has_its_status(client, body):
    plain = client.post("/v1/predict", content=body)
    reply = client.post("/v1/predict", content=body, headers=LINES)
    assert reply.status_code == plain.status_code == 400
    assert reply.json()["error"] == plain.json()["error"]


def test_a_timeout_behind_the_first_rows_is_the_last_line_and_counted(rows, serve, slow_blocks):
    with serve(rows, batching="stages", lanes=1) as server, server.client() as client:
        many = np.tile(X, (10, 1)).tolist()
        reply = client.post("/v1/predict", json={"instances": many, "timeout": 0.5}, headers=LINES)
        lines = [json.loads(line) for line in reply.text.splitlines()]
        assert reply.status_code == 200
        assert "timeout" in lines[-1]["error"]
        assert all("label" in line for line in lines[:-1])
        assert server.metric("requests_total", outcome="timeout") == 1
        assert client.post("/v1/predict", json={"instances": X[:1].tolist()}).status_code == 200


def test_who_leaves_in_the_middle_cancels_the_rest(rows, serve, slow_blocks, eventually):
    with serve(rows, batching="stages", lanes=1) as server:
        body = json.dumps({"instances": np.tile(X, (10, 1)).tolist()}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nAccept: application/x-ndjson\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head % len(body) + body)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: server.metric("requests_total", outcome="cancelled") == 1)
        eventually(lambda: server.metric("queue_rows", block="0") == 0)


def test_a_streamed_request_is_counted_once(rows, serve):
    with serve(rows) as server, server.client() as client:
        client.post("/v1/predict", json={"instances": X.tolist()}, headers=LINES)
        assert server.metric("requests_total", outcome="ok") == 1
        assert server.metric("rows_total", operating_point="balanced") == len(X)


@pytest.mark.parametrize(
    ("accept", "lines"),
    [
        ("Application/X-NDJSON", True),
        ("application/json;q=0.5, application/x-ndjson ;q=0.9", True),
        ("application/x-ndjson;q=0, application/json", False),
        ("application/x-ndjson;q=0.0", False),
        ("application/json, application/x-ndjson;q=0.9", False),
        ("application/x-ndjson;q=0.5, */*", False),
        ("application/x-ndjson;q=0.5, application/json;q=0.4, */*", True),
        ("application/x-ndjson, application/json", True),
        ("application/x-ndjson;q=high", True),
        ("application/x-ndjson+other", False),
        ("*/*", False),
    ],
)
def test_lines_are_for_whoever_asks_for_them(client, accept, lines):
    reply = client.post("/v1/predict", json={"instances": X[:2].tolist()}, headers={"Accept": accept})
    assert (reply.headers["content-type"] == LINES["Accept"]) == lines


def test_a_client_of_http_1_0_gets_its_lines_in_one_piece(rows, serve):
    with serve(rows) as server:
        body = json.dumps({"instances": X.tolist()}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /v1/predict HTTP/1.0\r\nAccept: application/x-ndjson\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head + body)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, text = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length: %d" % len(text) in head.lower()
    assert sorted(json.loads(line)["index"] for line in text.splitlines()) == list(range(len(X)))
