"""Several processes behind one address, offramp's own workers or uvicorn's: /metrics is about all, or says it can't."""

import os
import re
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


REPLACING = """
import sys
from offramp.server.cli import listen, serve
from offramp.server.connections.workers import serve_together
from offramp.server.settings import Settings

settings = Settings.of(bundle=sys.argv[1], workers=2, threads=1)
raise SystemExit(serve_together(serve, settings, listen("127.0.0.1", 0), young=0))
"""


def greeting_of(process):
    """What it prints, once it serves; and its address."""
    said = [process.stdout.readline() for _ in range(3)]
    return said, re.search(r"http://\S+:\d+", said[0])[0]


def pids_of(process):
    """Those of its workers."""
    found = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


def test_workers_answer_count_together_and_drain(offramp_serve, rows_bundle, x):
    process = offramp_serve(rows_bundle, "--port", 0, "--workers", 2, "--threads", 1)
    said, address = greeting_of(process)
    assert said[-1].endswith("1 threads, 2 workers\n")
    assert len(pids_of(process)) == 2
    with httpx.Client(base_url=address, headers={"Connection": "close"}, timeout=60) as client:
        for _ in range(20):
            assert client.post("/v1/predict", json={"instances": x[:3].tolist()}).status_code == 200
        assert all(total(client.get("/metrics").text, "offramp_rows_total") == 60 for _ in range(6))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_what_no_worker_can_start_with_is_said_once(offramp_serve, rows_bundle):
    process = offramp_serve(rows_bundle, "--port", 0, "--workers", 2, "--operating-point", "none")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert said.startswith("offramp serve: operating_point is 'none'")
    assert len(said.splitlines()) == 1


@pytest.fixture
def replacing(rows_bundle):
    command = [sys.executable, "-c", REPLACING, str(rows_bundle)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_worker_that_was_killed_is_replaced_and_none_outlives_its_parent(replacing, eventually):
    with httpx.Client(base_url=greeting_of(replacing)[1], headers={"Connection": "close"}, timeout=60) as client:
        eventually(lambda: up(client))
        before = pids_of(replacing)
        os.kill(min(before), signal.SIGKILL)
        eventually(lambda: len(pids_of(replacing)) == 2 and min(before) not in pids_of(replacing))
        eventually(lambda: up(client))
        replacing.kill()
        eventually(lambda: not up(client))
