"""Ray Serve with its batching."""

import os
import signal
import sys
import time
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from whole import Whole


@serve.deployment(
    num_replicas=int(os.environ["WORKERS"]), max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.1}
)
class Batched:
    def __init__(self) -> None:
        self.model = Whole()

    @serve.batch(max_batch_size=int(os.environ["BATCH"]), batch_wait_timeout_s=float(os.environ["WAIT_MS"]) / 1e3)
    async def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.model(rows)

    async def __call__(self, request: Request) -> dict[str, Any]:
        return await self.answer(await request.json())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000, configure_logging=False)
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])}, logging_config={"log_level": "ERROR"}
        )
        serve.run(Batched.bind(), route_prefix="/")
        while True:
            time.sleep(1)
    finally:
        ray.shutdown()
