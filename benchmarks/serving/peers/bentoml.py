"""BentoML with its adaptive batching."""

import os
import sys
from typing import Any

import bentoml
from whole import Whole


@bentoml.service(workers=int(os.environ["WORKERS"]), traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Batched:
    def __init__(self) -> None:
        self.model = Whole()

    @bentoml.api(
        batchable=True, max_batch_size=int(os.environ["BATCH"]), max_latency_ms=int(os.environ["MOST_LATENCY_MS"])
    )
    def predict(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.model(rows)


if __name__ == "__main__":
    command = [sys.executable, "-m", "bentoml", "serve", "peers.bentoml:Batched", "--host", "127.0.0.1"]
    os.execv(sys.executable, [*command, "--port", os.environ["PORT"]])
