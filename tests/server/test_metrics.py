import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def fresh(rows, serve):
    with serve(rows) as server, server.client() as client:
        yield server, client


def test_the_counters_add_up_to_what_was_answered(fresh, rows, x):
    server, client = fresh
    out = rows.predict({"x": x})
    for part in (x[:15], x[15:]):
        assert client.post("/v1/predict", json={"instances": part.tolist()}).status_code == 200
    assert server.metric("requests_total", outcome="ok") == 2
    assert server.metric("rows_total") == 40
    assert [server.metric("exits_total", exit=str(j)) for j in range(3)] == np.bincount(out.exit, minlength=3).tolist()
    assert server.metric("abstentions_total") == out.abstain.sum() > 0
    assert server.metric("flops_total") == out.flops.sum()
    assert server.metric("flops_full_total") == 40 * rows.row_flops({"batch": 1})[-1] > out.flops.sum()
    assert server.metric("request_duration_seconds_count") == 2
    assert server.metric("queue_duration_seconds_count", block="0") == 2


def test_what_ran_counts_the_rows_that_rode_along(fresh, rows, x):
    server, client = fresh
    client.post("/v1/predict", json={"instances": x.tolist()})
    executed = [server.metric("flops_executed_total", block=str(k)) for k in range(3)]
    assert executed == list(rows.predict({"x": x}).executed)
    assert sum(executed) >= server.metric("flops_total")


def test_flops_of_the_full_model_are_those_of_each_rows_own_length(tokens, serve):
    with serve(tokens) as server, server.client() as client:
        instances = [{"ids": [1] * n, "mask": [1] * n} for n in (2, 5)]
        client.post("/v1/predict", json={"instances": instances})
        full = [tokens.row_flops({"batch": 1, "seq": n})[-1] for n in (2, 5)]
        assert full[0] < full[1]
        assert server.metric("flops_full_total") == sum(full)


@pytest.mark.parametrize(
    ("outcome", "request_"),
    [
        ("invalid", {"content": b"{"}),
        ("invalid", {"json": {"instances": [1]}}),
        ("too_large", {"json": {"instances": [[0] * 8] * 20_000}}),
    ],
)
def test_a_refused_request_is_counted_and_no_row_of_it(fresh, outcome, request_):
    server, client = fresh
    client.post("/v1/predict", **request_)
    assert server.metric("requests_total", outcome=outcome) == 1
    assert server.metric("requests_total", outcome="ok") == 0
    assert server.metric("rows_total") == 0
    assert server.metric("request_duration_seconds_count") == 0


def test_binary_requests_are_counted_as_unsupported(fresh):
    server, client = fresh
    client.post("/v2/models/rows/infer", content=b"{}", headers={"Inference-Header-Content-Length": "2"})
    assert server.metric("requests_total", outcome="unsupported") == 1


def series(text):
    return {(s.name, tuple(sorted(s.labels.items()))) for f in text_string_to_metric_families(text) for s in f.samples}


def test_no_request_makes_a_series(fresh, x):
    _, client = fresh
    before = series(client.get("/metrics").text)
    client.post("/v1/predict", json={"instances": x.tolist(), "operating_point": "fast"})
    client.post("/v1/predict", json={"instances": [], "operating_point": "invented"})
    client.post("/v2/models/invented/infer", json={"id": "invented"}, headers={"X-Request-Id": "invented"})
    client.get("/invented")
    after = client.get("/metrics").text
    assert series(after) == before
    assert "invented" not in after


def test_two_servers_in_one_process_count_for_themselves(fresh, rows, serve, x):
    server, client = fresh
    with serve(rows) as other:
        client.post("/v1/predict", json={"instances": x.tolist()})
        assert server.metric("rows_total") == 40
        assert other.metric("rows_total") == 0


def test_the_build_says_what_is_served(fresh, rows):
    _, client = fresh
    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    labels = families["offramp_build_info"].samples[0].labels
    assert (labels["model"], labels["version"], labels["bundle"]) == ("rows", "1", rows.manifest.digest)
