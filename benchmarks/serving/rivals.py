"""The peers: how each is asked, and which of its settings are tried. peers/ has a file for each, and what it needs."""

import json

from offramp.runtime.arrays.cores import usable_cores

from serving.running import Peer

CORES = usable_cores()


def as_it_is(row: bytes) -> bytes:
    return row


def in_a_list(row: bytes) -> bytes:
    return b'{"rows":[' + row + b"]}"


def in_a_tensor(row: bytes) -> bytes:
    tensor = {"name": "row", "shape": [1, 1], "datatype": "BYTES", "data": [row.decode()]}
    return json.dumps({"inputs": [tensor]}).encode()


def batched(**more: object) -> list[dict[str, object]]:
    """What is tried of those that batch: one process with all threads, which spin or don't, small and large batches; a
    process a core."""
    whole, each = {"WORKERS": 1, "THREADS": CORES}, {"WORKERS": CORES, "THREADS": 1}
    return [
        {**whole, "BATCH": 16, "WAIT_MS": 2, **more},
        {**whole, "BATCH": 16, "WAIT_MS": 2, "SPIN": 1, **more},
        {**whole, "BATCH": 64, "WAIT_MS": 5, **more},
        {**each, "BATCH": 16, "WAIT_MS": 2, **more},
    ]


PEERS = [
    Peer(
        "fastapi",
        "FastAPI, no batching",
        "/predict",
        as_it_is,
        [
            {"WORKERS": CORES, "THREADS": 1},
            {"WORKERS": 1, "THREADS": CORES},
            {"WORKERS": 1, "THREADS": CORES, "SPIN": 1},
        ],
    ),
    Peer("litserve", "LitServe", "/predict", as_it_is, batched()),
    Peer("mosec", "mosec", "/inference", as_it_is, batched()),
    Peer(
        "mlserver",
        "MLServer",
        "/v2/models/whole/infer",
        in_a_tensor,
        [*batched()[:-1], {"WORKERS": 0, "THREADS": CORES, "BATCH": 16, "WAIT_MS": 2}],
    ),
    Peer("bentoml", "BentoML", "/predict", in_a_list, batched(MOST_LATENCY_MS=10_000)),
    Peer("ray", "Ray Serve", "/", as_it_is, batched()),
]
