"""A server that is killed in the middle of it all comes back with what it had acknowledged."""

import json
import os
import signal
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException

import pytest
from offramp.server.load.serving import served

STORE = ("--recalibration", "kept.db", "--kept-unflushed", "64", "--recalibration-mode", "automatic")


def ask(url, path, body=None, method=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


class Client(threading.Thread):
    """Asks, labels and freezes until nobody answers; remembers what was acknowledged."""

    def __init__(self, url, row, run):
        super().__init__()
        self.url, self.row, self.run_number = url, row, run
        self.labels, self.decided = {}, 0

    def run(self):
        try:
            for k in range(10**6):
                name = ask(self.url, "/v1/predict", {"instances": [{"x": self.row}]})["request_id"]
                label = k % 3
                (outcome,) = ask(self.url, "/v1/feedback", {"request_id": name, "label": label})["outcomes"]
                assert outcome == "accepted"
                self.labels[name] = label
                if k % 5 == 0:
                    frozen = k % 10 == 0
                    ask(self.url, "/v1/recalibration/freeze", {"by": f"run {self.run_number}", "frozen": frozen})
                    self.decided += 1
        except (OSError, HTTPException, urllib.error.URLError):
            pass  # killed


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_nothing_acknowledged_is_lost(rows_bundle, x, tmp_path, monkeypatch, kills):
    monkeypatch.chdir(tmp_path)
    acknowledged, decisions, decided = {}, 0, 0
    for run in range(kills):
        with served(rows_bundle, options=STORE) as server:
            state = ask(server.url, "/v1/recalibration?decisions=10000")
            assert len(state["decisions"]) >= decisions + decided
            revisions = [one["revision"] for one in state["decisions"]]
            assert revisions == sorted(set(revisions))
            decisions = len(revisions)
            if acknowledged:
                name, label = next(reversed(acknowledged.items()))
                assert ask(server.url, "/v1/feedback", {"request_id": name, "label": label})["outcomes"] == [
                    "duplicate"
                ]
            client = Client(server.url, x[0].tolist(), run)
            client.start()
            time.sleep(0.4 + 0.13 * (run % 7))
            os.kill(server.pid, signal.SIGKILL)
            client.join()
        acknowledged |= client.labels
        decided = client.decided
        assert client.labels
    with sqlite3.connect("kept.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = dict(database.execute("SELECT request, label FROM served WHERE label IS NOT NULL"))
    lost = [name for name, label in acknowledged.items() if kept.get(name.encode()) != label]
    assert not lost
