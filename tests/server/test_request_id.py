"""One name for a request: in the answer, its header, every error, and the log."""

import logging
import re

import pytest


@pytest.fixture
def client(rows, serve):
    with serve(rows) as server, server.client() as client:
        yield client


@pytest.fixture
def log():
    """What the server logs. uvicorn's loggers hand nothing on to the root's."""
    lines, logger = [], logging.getLogger("uvicorn.error.offramp")

    def seen(record):  # a filter: a server that starts takes handlers away
        lines.append(record.getMessage())
        return True

    before = logger.level
    logger.addFilter(seen)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeFilter(seen)
    logger.setLevel(before)


GOOD = {"instances": [[0.5] * 8]}


@pytest.mark.parametrize("name", ["abc", "0-9_A.z:1", "pod-7/A+b9==", "me@here~1", "x" * 200])
def test_a_name_that_the_client_chose_comes_back(client, name):
    reply = client.post("/v1/predict", json=GOOD, headers={"X-Request-ID": name})
    assert reply.json()["request_id"] == reply.headers["X-Request-ID"] == name


@pytest.mark.parametrize("name", ["", "a b", "x" * 201, "<script>", "a\tb"])
def test_one_that_is_none_or_could_mean_something_elsewhere_is_replaced(client, name):
    reply = client.post("/v1/predict", json=GOOD, headers={"X-Request-ID": name})
    assert reply.status_code == 200
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["X-Request-ID"])
    assert reply.json()["request_id"] == reply.headers["X-Request-ID"]


def test_each_request_has_its_own(client):
    assert len({client.get("/v2/health/live").headers["X-Request-ID"] for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/predict", b"{", 400),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/predict", None, 405),
        ("POST", "/v2/models/other/infer", b"{}", 404),
        ("POST", "/v1/predict", b'{"instances": [' + b"[]," * 20_000 + b"[]]}", 413),
    ],
)
def test_every_error_says_it(client, method, path, body, status):
    reply = client.request(method, path, content=body, headers={"X-Request-ID": "mine"})
    assert reply.status_code == status
    assert reply.json()["request_id"] == reply.headers["X-Request-ID"] == "mine"


def test_an_error_that_nobody_expected_says_it_and_so_does_the_log(rows, serve, monkeypatch, log):
    def fail(*_):
        raise RuntimeError("secret")

    with serve(rows) as server, server.client() as client:
        monkeypatch.setattr(type(server.app.state.operating_points), "choose", fail)
        reply = client.post("/v1/predict", json=GOOD, headers={"X-Request-ID": "mine"})
    assert reply.status_code == 500
    assert reply.json() == {"error": "internal error (RuntimeError).", "request_id": "mine"}
    assert reply.headers["X-Request-ID"] == "mine"
    assert "request mine: POST /v1/predict: RuntimeError" in log


def test_the_log_has_a_line_a_request(client, log):
    client.get("/v2/health/live", headers={"X-Request-ID": "mine"})
    assert log == ["request mine: GET /v2/health/live 200"]
