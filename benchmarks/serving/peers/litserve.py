"""LitServe with its batching."""

import os
from typing import Any

import litserve
from whole import Whole


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = Whole()

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(inputs)

    def predict(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.model(rows)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    api = Api(max_batch_size=int(os.environ["BATCH"]), batch_timeout=float(os.environ["WAIT_MS"]) / 1e3)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(os.environ["WORKERS"]))
    server.run(
        host="127.0.0.1",
        port=int(os.environ["PORT"]),
        num_api_servers=1,
        log_level="error",
        access_log=False,
        generate_client_file=False,
    )
