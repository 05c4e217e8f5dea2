"""The container's health check, asked of servers that are well, ill, or not there."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "deploy/health.py"


@contextmanager
def answering(status, port=0):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/v2/health/ready" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", port), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def check(**env):
    mine = {name: value for name, value in os.environ.items() if not name.startswith("OFFRAMP_")}
    return subprocess.run([sys.executable, CHECK], env={**mine, **env}, capture_output=True, text=True)


@pytest.mark.parametrize("proxy", [{}, {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}])
def test_a_server_that_is_ready_is_well_whatever_proxy_there_is(proxy):
    with answering(200) as port:
        done = check(OFFRAMP_PORT=str(port), **proxy)
        assert (done.returncode, done.stderr) == (0, "")


def test_one_that_drains_or_is_not_there_is_not():
    with answering(503) as port:
        done = check(OFFRAMP_PORT=str(port))
        assert (done.returncode, done.stderr) == (1, f"port {port} answers 503\n")
    for port in ("1", "http", "70000"):
        done = check(OFFRAMP_PORT=port)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith(f"no answer at port {port}: ")


def free_8000():
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 8000)) != 0


@pytest.mark.parametrize(
    "env", [{}, *({"OFFRAMP_PORT": v} for v in ("", " ", "tcp://10.0.0.7:8000", "udp://[fd00::7]:1"))]
)
def test_what_kubernetes_sets_and_nothing_at_all_are_the_port_that_a_server_takes_by_itself(env):
    if not free_8000():
        pytest.skip("somebody listens on port 8000 here")
    with answering(200, 8000):
        done = check(**env)
        assert (done.returncode, done.stderr) == (0, "")
