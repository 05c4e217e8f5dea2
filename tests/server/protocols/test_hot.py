"""The hot routes answer as FastAPI's own, to the byte, and step back where an app was changed."""

import json

import pytest
from offramp.server import Settings, create_app

GOOD = [[0.5] * 8]
TENSOR = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": GOOD}
ASKED = [
    ("POST", "/v1/predict", {}, {"instances": GOOD}),
    ("POST", "/v1/predict", {}, {"instances": [[1]]}),
    ("POST", "/v1/predict", {}, {"instances": GOOD * 99_999}),
    ("POST", "/v1/predict", {"Content-Encoding": "br"}, {"instances": GOOD}),
    ("POST", "/v1/predict/", {}, {"instances": GOOD}),
    ("GET", "/v1/predict", {}, None),
    ("HEAD", "/v1/predict", {}, None),
    ("OPTIONS", "/v1/predict", {}, None),
    ("POST", "/v2/models/rows/infer", {}, {"inputs": [TENSOR]}),
    ("POST", "/v2/models/rows/infer", {"Inference-Header-Content-Length": "5"}, {"inputs": [TENSOR]}),
    ("POST", "/v2/models/rows/versions/1/infer", {}, {"inputs": [TENSOR]}),
    ("POST", "/v2/models/rows/versions/99/infer", {}, {"inputs": [TENSOR]}),
    ("POST", "/v2/models/other/infer", {}, {"inputs": [TENSOR]}),
    ("GET", "/v2/models/rows/infer", {}, None),
]


class Through:
    """A middleware of somebody else."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-through", b"yes"))
            await send(message)

        await self.app(scope, receive, marked if scope["type"] == "http" else send)


@pytest.fixture
def both(rows, listen):
    other = create_app(rows, Settings.of())
    other.add_middleware(Through)
    with listen(create_app(rows, Settings.of())) as hot, listen(other) as cold:
        yield hot, cold


# What differs between two servers, and whether the body had been read when it was answered.
OWN = ("connection", "date", "location", "x-through")


@pytest.mark.parametrize(("method", "path", "headers", "body"), ASKED)
def test_what_is_asked_is_answered_the_same_way_through_fastapi(both, method, path, headers, body):
    replies = []
    for server in both:
        with server.client() as client:
            content = None if body is None else json.dumps(body)
            reply = client.request(method, path, content=content, headers={**headers, "X-Request-ID": "a"})
            replies.append((reply.status_code, reply.content, {**reply.headers, **dict.fromkeys(OWN, "")}))
    assert replies[0] == replies[1]


def test_a_middleware_that_was_added_is_for_the_hot_routes_too(both):
    for server, through in zip(both, (None, "yes"), strict=True):
        with server.client() as client:
            assert client.post("/v1/predict", json={"instances": GOOD}).headers.get("x-through") == through


def test_an_unexpected_error_is_500_and_says_nothing_of_this_machine(both, monkeypatch):
    def broken(*_):
        raise RuntimeError("/a/path")

    for server in both:
        monkeypatch.setattr(server.app.state.metrics, "answered", broken)
        with server.client() as client:
            reply = client.post("/v1/predict", json={"instances": GOOD}, headers={"X-Request-ID": "a"})
            assert reply.status_code == 500
            assert reply.json() == {"error": "internal error (RuntimeError).", "request_id": "a"}
