"""Several worker processes behind one address: /metrics is about all of them, or says that it can't be."""

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers share a socket")


@pytest.fixture
def workers(rows_bundle):
    """`uvicorn --workers 2` over the application's factory; gives a client that never keeps a connection."""
    started = []

    def start(**env):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "--factory", "offramp.server:create_app", "--workers", "2"]
        process = subprocess.Popen(
            [*command, "--port", str(port), "--log-level", "error"],
            env={**os.environ, "OFFRAMP_BUNDLE": str(rows_bundle), **env},
            start_new_session=True,
        )
        started.append(process)
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Connection": "close"}, timeout=60)

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def up(client):
    try:
        return client.get("/v2/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


def total(text, name, **labels):
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


def test_with_a_shared_folder_every_scrape_has_the_numbers_of_all_workers(workers, eventually, x, tmp_path):
    with workers(PROMETHEUS_MULTIPROC_DIR=str(tmp_path)) as client:
        eventually(lambda: up(client))
        for _ in range(30):
            assert client.post("/v1/predict", json={"instances": x[:3].tolist()}).status_code == 200
        for _ in range(10):
            text = client.get("/metrics").text
            assert total(text, "offramp_rows_total") == 90
            assert total(text, "offramp_requests_total", outcome="ok") == 30
            assert total(text, "offramp_request_duration_seconds_count") == 30
            assert total(text, "offramp_queue_rows") == 0
            assert total(text, "offramp_build_info") == 1


def test_without_one_no_scrape_shows_a_part_as_if_it_were_all(workers, eventually, x):
    with workers() as client:
        eventually(lambda: up(client))
        assert client.post("/v1/predict", json={"instances": x[:3].tolist()}).status_code == 200
        for _ in range(10):
            reply = client.get("/metrics")
            assert reply.status_code == 501
            assert "PROMETHEUS_MULTIPROC_DIR" in reply.json()["error"]


def test_a_shared_folder_that_is_not_there_is_named(offramp_serve, rows_bundle, tmp_path):
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "none")}
    process = offramp_serve(rows_bundle, "--port", 0, env=env)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert error.startswith("offramp serve: PROMETHEUS_MULTIPROC_DIR is ")
