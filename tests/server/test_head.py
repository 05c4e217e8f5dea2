"""HEAD, as monitors and load balancers ask it."""

import pytest

PATHS = [
    "/", "/try", "/docs", "/openapi.json", "/metrics", "/static/live.js", "/static/look.css", "/static/none.js",
    "/none", "/v1/operating-points", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/rows",
    "/v2/models/rows/ready", "/v2/models/rows/versions/1", "/v2/models/rows/versions/1/ready", "/v2/models/other",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_head_is_the_head_of_a_get(client, path):
    got, head = client.get(path), client.head(path)
    assert head.status_code == got.status_code
    assert head.content == b""
    own = {"x-request-id", "date"} | ({"content-length"} if path == "/metrics" else set())  # numbers grow
    assert {k: v for k, v in head.headers.items() if k not in own} == {
        k: v for k, v in got.headers.items() if k not in own
    }
    assert int(head.headers["content-length"]) > 0


def test_every_path_that_is_gotten_is_among_them(client):
    paths = client.get("/openapi.json").json()["paths"]
    gotten = {path.replace("{model}", "rows") for path, operations in paths.items() if "get" in operations}
    assert gotten <= set(PATHS)


@pytest.mark.parametrize("path", ["/v1/predict", "/v2/models/rows/infer"])
def test_head_where_nothing_is_gotten_is_refused_and_says_what_is(client, path):
    head = client.head(path)
    assert (head.status_code, head.headers["allow"], head.content) == (405, "POST", b"")


@pytest.mark.parametrize("path", ["/metrics", "/v1/operating-points", "/v2/health/live"])
def test_where_something_is_gotten_head_is_among_what_is_allowed(client, path):
    reply = client.put(path)
    assert reply.status_code == 405
    assert sorted(reply.headers["allow"].split(", ")) == ["GET", "HEAD"]


def test_a_kept_connection_goes_on_behind_a_head(client):
    for _ in range(3):
        assert client.head("/metrics").status_code == 200
        assert client.get("/v2/health/live").json() == {"live": True}
