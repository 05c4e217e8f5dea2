"""Rows that are expensive, such as long texts: whoever leaves frees the lane after a small piece, not after a batch."""

import json
import socket

import pytest
from offramp.runtime import Cascade
from offramp.server.engine import BatchingEngine

ROWS, SHORT = 384, {"ids": [1, 2, 3, 4]}
LENGTHS = {"one length": (512,), "several lengths": (512, 504, 496)}


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory):
    """Two exits over ids [batch, seq]; a row of 512 takes 2 GFLOPs."""
    torch = pytest.importorskip("torch")
    from offramp.export import export_bundle

    class Texts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 256)
            self.again = torch.nn.Linear(256, 256)
            self.heads = torch.nn.ModuleList(torch.nn.Linear(256, 3) for _ in range(2))

        def forward(self, ids):
            x = torch.relu(self.again(self.embedding(ids)))
            early = self.heads[0](x.mean(1))
            for _ in range(30):
                x = torch.relu(self.again(x))
            return [early, self.heads[1](x.mean(1))]

    torch.manual_seed(3)
    example, axes = {"ids": torch.randint(0, 50, (4, 6))}, {"ids": {0: "batch", 1: "seq"}}
    folder = export_bundle(Texts().eval(), example, tmp_path_factory.mktemp("long") / "b", dynamic_axes=axes)
    with Cascade.load(folder, threads=1) as cascade:
        yield cascade


@pytest.fixture
def pieces(monkeypatch):
    """(rows, length) of each batch that the engine has begun."""
    begun, run = [], BatchingEngine.run_batch

    def noted(self, batch):
        begun.append((batch.rows, *batch.place.sizes))
        return run(self, batch)

    monkeypatch.setattr(BatchingEngine, "run_batch", noted)
    return begun


def many(lengths):
    return [{"ids": [k % 50] * lengths[k % len(lengths)]} for k in range(ROWS)]


def its_time_is_over(server, rows, pieces, eventually):
    with server.client() as client:
        assert client.post("/v1/predict", json={"instances": rows, "timeout": 0.5}).status_code == 503


def its_client_leaves(server, rows, pieces, eventually):
    body = json.dumps({"instances": rows}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: pieces)
    eventually(lambda: server.metric("requests_total", outcome="cancelled") == 1)


@pytest.mark.parametrize("leave", [its_time_is_over, its_client_leaves], ids=["its time", "its client"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_whoever_leaves_frees_the_lane_after_a_small_piece(long_rows, serve, pieces, eventually, leave, lengths):
    def cost(shape):
        return shape[0] * long_rows.row_flops({"seq": shape[1]})[-1]

    with serve(long_rows) as server:
        leave(server, many(lengths), pieces, eventually)
        begun = len(pieces)
        with server.client() as client:
            assert client.post("/v1/predict", json={"instances": [SHORT]}).status_code == 200
    after = [shape for shape in pieces[begun:] if shape[1] > 4]
    assert len(after) <= 1, "the piece that finds out that nobody waits"
    assert pieces[-1] == (1, 4)
    assert max(cost(shape) for shape in pieces) < cost((ROWS, 512)) / 8
    assert sum(cost(shape) for shape in pieces) < cost((ROWS, 512))
