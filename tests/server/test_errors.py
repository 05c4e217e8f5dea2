import pytest


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1", 404),
        ("GET", "/v2/models/rows/metadata/more", 404),
        ("GET", "/v1/predict", 405),
        ("DELETE", "/metrics", 405),
        ("POST", "/v2/health/live", 405),
        ("PUT", "/v2/models/rows/infer", 405),
        ("POST", "/v1/predict", 400),
    ],
)
def test_every_error_is_one_shape(client, method, path, status):
    reply = client.request(method, path)
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json()) == ["error", "request_id"]
    assert reply.json()["error"].endswith(".")


def test_a_path_with_strange_letters_is_named_as_valid_json(client):
    assert "кот" in client.get('/кот"\\').json()["error"]


def test_a_wrong_method_says_which_ones_there_are(client):
    assert client.get("/v1/predict").headers["allow"] == "POST"


def test_a_cascade_that_was_closed_is_503(rows_bundle, serve, x):
    from offramp.runtime import Cascade

    cascade = Cascade.load(rows_bundle, threads=1)
    with serve(cascade) as server, server.client() as client:
        cascade.close()
        reply = client.post("/v1/predict", json={"instances": x.tolist()})
        assert reply.status_code == 503
        assert "closed" in reply.json()["error"]
