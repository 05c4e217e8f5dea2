"""A real `offramp serve` in a process of its own."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest


@pytest.fixture
def serve():
    """serve(bundle, operating_point) -> address, ready to answer; ended with the test."""
    processes = []

    def start(bundle, operating_point: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "offramp.runtime.cli", "serve", str(bundle), "--port", str(port)]
        process = subprocess.Popen([*command, "--operating-point", operating_point], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            if process.poll() is not None:
                raise AssertionError(process.stderr.read() if process.stderr else "the server stopped")
            try:
                urllib.request.urlopen(f"{address}/v2/health/ready", timeout=5).close()
                return address
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError("the server never became ready")

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(timeout=20) == 0, "SIGTERM drains and exits 0"
