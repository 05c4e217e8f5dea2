"""MLServer with its adaptive batching. It joins tensors of one width only, so a row comes as JSON in a string.

Its workers don't start with uvloop 0.22 or later, so an earlier one is pinned.
"""

import asyncio
import json
import os

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
from whole import Whole


class Batched(MLModel):
    async def load(self) -> bool:
        self.model = Whole()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        answers = self.model([json.loads(row) for row in StringCodec.decode_input(payload.inputs[0])])
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                ResponseOutput(
                    name=name, shape=[len(answers), 1], datatype=kind, data=[answer[name] for answer in answers]
                )
                for name, kind in (("label", "INT64"), ("confidence", "FP32"))
            ],
        )


async def main() -> None:
    port = int(os.environ["PORT"])
    settings = Settings(
        host="127.0.0.1",
        http_port=port,
        grpc_port=port + 1,
        metrics_endpoint=None,
        parallel_workers=int(os.environ["WORKERS"]),
        load_models_at_startup=False,
        use_structured_logging=False,
        debug=False,
        model_repository_root=os.devnull,
    )
    server = MLServer(settings)
    model = ModelSettings(
        name="whole",
        implementation=Batched,
        max_batch_size=int(os.environ["BATCH"]),
        max_batch_time=float(os.environ["WAIT_MS"]) / 1e3,
    )
    await server.start([model])


if __name__ == "__main__":
    asyncio.run(main())
