import re
import sys

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
    assert server.metric("rows_total", operating_point="balanced") == 40
    at = {"operating_point": "balanced"}
    left = [server.metric("exits_total", exit=str(j), **at) for j in range(3)]
    assert left == np.bincount(out.exit, minlength=3).tolist()
    assert server.metric("abstentions_total", **at) == out.abstain.sum() > 0
    assert server.metric("flops_total", **at) == out.flops.sum()
    assert server.metric("flops_full_total", **at) == 40 * rows.row_flops({"batch": 1})[-1] > out.flops.sum()
    assert server.metric("request_duration_seconds_count") == 2
    assert server.metric("queue_duration_seconds_count", block="0") == 2


def test_what_ran_counts_the_rows_that_rode_along(fresh, rows, x):
    server, client = fresh
    client.post("/v1/predict", json={"instances": x.tolist()})
    executed = [server.metric("flops_executed_total", block=str(k)) for k in range(3)]
    assert executed == list(rows.predict({"x": x}).executed)
    assert sum(executed) >= server.metric("flops_total", operating_point="balanced")


def test_each_point_has_its_own_saving(fresh, rows, x):
    """What is asked of the whole network on purpose doesn't lessen what another point is seen to save."""
    server, client = fresh
    for point in ("full", "balanced", "full"):
        client.post("/v1/predict", json={"instances": x.tolist(), "operating_point": point})
    whole = len(x) * rows.row_flops({"batch": 1})[-1]
    for point, times in (("full", 2), ("balanced", 1)):
        out = rows.at(point).predict({"x": x})
        assert server.metric("flops_total", operating_point=point) == times * out.flops.sum()
        assert server.metric("flops_full_total", operating_point=point) == times * whole
        assert server.metric("abstentions_total", operating_point=point) == times * out.abstain.sum()
        left = [server.metric("exits_total", exit=str(j), operating_point=point) for j in range(3)]
        assert left == (times * np.bincount(out.exit, minlength=3)).tolist()


def test_flops_of_the_full_model_are_those_of_each_rows_own_length(tokens, serve):
    with serve(tokens) as server, server.client() as client:
        instances = [{"ids": [1] * n, "mask": [1] * n} for n in (2, 5)]
        client.post("/v1/predict", json={"instances": instances})
        full = [tokens.row_flops({"batch": 1, "seq": n})[-1] for n in (2, 5)]
        assert full[0] < full[1]
        assert server.metric("flops_full_total", operating_point=tokens.operating_point.name) == sum(full)


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
    assert server.metric("rows_total", operating_point="full") == 0
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
        assert server.metric("rows_total", operating_point="balanced") == 40
        assert other.metric("rows_total", operating_point="full") == 0


def test_the_build_says_what_is_served(fresh, rows):
    _, client = fresh
    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    labels = families["offramp_build_info"].samples[0].labels
    assert (labels["model"], labels["version"], labels["bundle"]) == ("rows", "1", rows.manifest.digest)


def test_rows_are_counted_by_operating_point_each_of_them_from_the_start(fresh, x):
    server, client = fresh
    client.post("/v1/predict", json={"instances": x[:3].tolist(), "operating_point": "fast"})
    client.post("/v1/predict", json={"instances": x[:4].tolist(), "operating_point": "fast", "max_exit": 0})
    counted = {name: server.metric("rows_total", operating_point=name) for name in ("full", "balanced", "fast")}
    assert counted == {"full": 0, "balanced": 0, "fast": 7}


def test_times_of_small_models_fall_into_buckets_of_their_own(fresh, x):
    _, client = fresh
    client.post("/v1/predict", json={"instances": x[:1].tolist()})
    text = client.get("/metrics").text
    bounds = [float(bound) for bound in re.findall(r'queue_duration_seconds_bucket\{[^}]*le="([\d.e-]+)"', text)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0.00005
    assert sum(bound < 0.001 for bound in bounds) >= 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_the_process_is_measured_too(fresh):
    text = fresh[1].get("/metrics").text
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert re.search(rf"^{name} [1-9]", text, re.MULTILINE), name


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain; version=latest",
        "text/plain;version=",
        "text/plain; version=1.x",
        "text/plain; version=\u00b2",
        "application/openmetrics-text; version=latest",
        "application/openmetrics-text; version=1e400",
        "application/openmetrics-text; version=1.0.0; escaping=none",
        "application/openmetrics-text; version=" + "9" * 5000,
        "text/plain; q=high",
        "*/*",
        ";;;=,,",
        "\u00ff",
        "",
    ],
)
def test_metrics_are_given_whatever_a_client_says_it_accepts(client, accept):
    reply = client.get("/metrics", headers={"Accept": accept.encode()})
    assert reply.status_code == 200
    assert "offramp_rows_total{" in reply.text
