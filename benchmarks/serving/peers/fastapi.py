"""FastAPI around one session, without batching: what one writes first. uvicorn with uvloop and httptools."""

import os
from typing import Any

import uvicorn
from fastapi import FastAPI
from whole import Whole

app = FastAPI()
model = Whole()


@app.post("/predict")
async def predict(row: dict[str, Any]) -> dict[str, Any]:
    return model([row])[0]


if __name__ == "__main__":
    uvicorn.run(
        "peers.fastapi:app",
        port=int(os.environ["PORT"]),
        workers=int(os.environ["WORKERS"]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="error",
        timeout_worker_healthcheck=60,  # a busy machine's workers take longer than 5 s to begin, and are ended then
    )
