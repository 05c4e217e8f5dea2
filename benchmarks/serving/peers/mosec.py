"""mosec with its batching: the HTTP side is Rust."""

import os
import sys
from typing import Any

from mosec import Server, Worker
from whole import Whole


class Inference(Worker):
    def __init__(self) -> None:
        self.model = Whole()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.model(data)


if __name__ == "__main__":
    sys.argv += ["--address", "127.0.0.1", "--port", os.environ["PORT"], "--log-level", "error"]
    server = Server()
    server.append_worker(
        Inference,
        num=int(os.environ["WORKERS"]),
        max_batch_size=int(os.environ["BATCH"]),
        max_wait_time=int(os.environ["WAIT_MS"]),
    )
    server.run()
