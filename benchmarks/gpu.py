"""What the GPU path costs and saves: the gate, the gather, and whole cascades. For a machine with a CUDA GPU, offline.

    python benchmarks/gpu.py                # about four minutes
    python benchmarks/gpu.py --cpu-check    # the same steps at toy sizes, on CPU in Triton's interpreter: no result

First everything is compared with float64. Kernels are timed as CUDA graphs of many launches, so that the host doesn't
show; medians over replays. The floor is the bytes that have to be read over the bandwidth of a large copy (which reads
and writes), and never below an empty launch. Cascades are timed whole: arrays in, answers out. The models have random
weights, for which time doesn't care, and thresholds that make the wanted share leave after half the blocks.
"""

# ruff: noqa: E501 (tables are printed a line each)
import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

CHECK = "--cpu-check" in sys.argv
if CHECK:  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from harness import machine, save, table  # noqa: E402
from offramp.kernels import exit_gate, gather, reference  # noqa: E402
from offramp.kernels.compact import Report  # noqa: E402
from offramp.kernels.exit_gate import gate_into  # noqa: E402
from offramp.kernels.reference import GateOutput, Survivors  # noqa: E402
from offramp.runtime import OperatingPoint  # noqa: E402
from offramp.runtime.bundle import Block, Bundle, Exit, Input, Manifest, Segment, Tensor  # noqa: E402
from offramp.runtime.execution.call import Call  # noqa: E402
from offramp.runtime.execution.device.executor import DeviceExecutor  # noqa: E402
from offramp.runtime.execution.device.torch.graphs import TorchGraphs  # noqa: E402
from offramp.runtime.execution.route import Route  # noqa: E402
from offramp.runtime.gate import Gate  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

DEVICE = torch.device("cpu" if CHECK else "cuda")
ROWS = (1, 5) if CHECK else (1, 32, 256, 4096)
CLASSES = (10, 9000) if CHECK else (10, 150, 1000, 32000, 128256)
BUDGET = 280.0  # seconds for everything; what doesn't fit is left out, and said to be
STARTED = time.perf_counter()


def left() -> float:
    return BUDGET - (time.perf_counter() - STARTED)


# ------------------------------------------------------------------ timing


def seconds(run: Callable[[], Any], rounds: int = 15) -> float:
    """Median seconds of one call on the device, without what the host takes to launch it."""
    run()
    if CHECK:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        once = events(run, 1)
        launches = int(min(200, max(1, 2e-3 / max(once, 1e-6))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(launches):
                run()
        graph.replay()
        return float(np.median([events(graph.replay, 1) for _ in range(rounds)])) / launches


def events(run: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def attempt(run: Callable[[], float]) -> float | None:
    """A number, or None where the card has no room for it."""
    try:
        return run()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


@triton.jit
def _nothing(target, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))


def baselines() -> dict[str, float]:
    """Bytes a second of a large copy (read and written), and seconds of a launch that does next to nothing."""
    source = torch.empty((1 << 16 if CHECK else 1 << 30) // 4, device=DEVICE)
    target, small = torch.empty_like(source), torch.empty(32, device=DEVICE)
    copying = seconds(lambda: target.copy_(source))
    return {
        "copy_bytes_per_second": 2 * source.numel() * 4 / copying,
        "empty_launch_seconds": seconds(lambda: _nothing[(1,)](small, BLOCK=32)),
    }


# ------------------------------------------------------------------ the gate


def plain_gate(z: torch.Tensor, threshold: float) -> tuple[torch.Tensor, ...]:
    """What one writes in torch for the same six answers."""
    z = z.float()
    two, index = z.topk(min(2, z.shape[1]), 1)
    label, log_p = index[:, 0], torch.log_softmax(z, 1)
    rest = z.scatter(1, label[:, None], -torch.inf)
    score = two[:, 0] - torch.logsumexp(rest, 1)
    p = log_p.exp()
    best = p.gather(1, index)
    return label, best[:, 0], score, -(p * log_p).sum(1), best[:, 0] - best[:, -1], score >= threshold


def correctness() -> dict[str, float]:
    """The worst difference to float64 over sizes, types and extremes; raises if a label or a decision differs."""
    worst = {"score": 0.0, "confidence": 0.0, "entropy": 0.0, "margin": 0.0}
    generator = torch.Generator().manual_seed(0)
    for rows, classes in ((3, 1), (64, 10), (33, 150), (17, 1000), (5, 9000), *(() if CHECK else ((8, 128256),))):
        for kind in (torch.float32, torch.float16, torch.bfloat16):
            z = (torch.randn(rows, classes, generator=generator) * 20).to(kind)
            z[0, -1] = torch.inf
            z[1, 0] = torch.nan
            z[2] = 1.0
            got, want = exit_gate(z.to(DEVICE), threshold=2.0), reference.exit_gate(z.double().numpy(), threshold=2.0)
            assert got.label.cpu().tolist() == want.label.tolist(), (rows, classes, kind)
            assert got.leave.cpu().tolist() == want.leave.tolist(), (rows, classes, kind)
            for name in worst:
                mine, right = getattr(got, name).cpu().double().numpy(), getattr(want, name).astype(np.float64)
                off = np.nanmax(np.abs(mine - right) / np.maximum(1, np.abs(right)))
                worst[name] = max(worst[name], float(off))
    return worst


def gate_table(base: Mapping[str, float], compiles: bool) -> list[dict[str, Any]]:
    """Microseconds of the gate, of torch's operations one by one and compiled, and of the floor."""
    found = []
    first = [(4096, 1000), (32, 150)]  # the sizes that promises are made for, while there is time
    cells = [cell for cell in first if cell[0] in ROWS and cell[1] in CLASSES]
    cells += [(b, c) for c in CLASSES for b in ROWS if (b, c) not in cells]
    for rows, classes in cells:
        if left() < 110 and not CHECK:
            print(f"  ({rows}, {classes}) and what follows left out: no time")
            break
        for kind in (torch.float32, torch.bfloat16):
            z = torch.randn(rows, classes, device=DEVICE).to(kind) * 5
            report = Report(rows, DEVICE)
            every = exit_gate(z)
            lean = GateOutput(report.label, None, report.score, None, None, report.leave)
            survivors = Survivors(report.survivors, report.count)
            size = z.numel() * z.element_size()
            floor = max(size / base["copy_bytes_per_second"], base["empty_launch_seconds"])
            row: dict[str, Any] = {"rows": rows, "classes": classes, "dtype": str(kind).removeprefix("torch.")}
            row["gate"] = seconds(lambda z=z, out=every: gate_into(out, z, threshold=1.0))  # type: ignore[misc]
            row["cascade's gate"] = seconds(  # label, score, and who stays, in the same launch
                lambda z=z, out=lean, s=survivors: gate_into(out, z, threshold=1.0, survivors=s)  # type: ignore[misc]
            )
            row["eager"] = attempt(lambda z=z: seconds(lambda: plain_gate(z, 1.0)))  # type: ignore[misc]
            row["compiled"] = None
            if compiles and kind is torch.float32:
                torch._dynamo.reset()
                compiled = torch.compile(plain_gate, dynamic=False, backend="eager" if CHECK else "inductor")
                row["compiled"] = attempt(lambda z=z, run=compiled: seconds(lambda: run(z, 1.0)))  # type: ignore[misc]
            row["floor"] = floor
            row["of copy bandwidth"] = size / row["gate"] / base["copy_bytes_per_second"]
            found.append(row)
    print(table([("rows", "classes", "dtype", "gate us", "cascade's", "eager", "compiled", "floor", "of bandwidth"),
                 *[(str(r["rows"]), str(r["classes"]), r["dtype"], *[micro(r[k]) for k in ("gate", "cascade's gate", "eager", "compiled", "floor")],
                    f"{r['of copy bandwidth']:.2f}") for r in found]]))  # fmt: skip
    return found


def micro(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e6:.1f}"


def gather_table(base: Mapping[str, float]) -> list[dict[str, Any]]:
    """Half of a batch's state moved: one launch for all tensors, against torch's one a tensor."""
    found = []
    for rows in ROWS:
        length, width = (3, 8) if CHECK else (32, 384)
        state = [
            torch.randn(rows, length, width, device=DEVICE),
            torch.zeros(rows, 1, 1, length, device=DEVICE),
            torch.ones(rows, length, 1, device=DEVICE, dtype=torch.bool),
            torch.randn(1, rows, width, device=DEVICE).half(),
        ]
        axes, keep = [0, 0, 0, 1], torch.arange(0, rows, 2, device=DEVICE, dtype=torch.int32)
        out = gather(state, keep, axes)
        moved = sum(2 * t.numel() * t.element_size() for t in out)
        row = {
            "rows": rows,
            "gather": seconds(lambda s=state, k=keep, a=axes, o=out: gather(s, k, a, out=o)),  # type: ignore[misc]
            "torch": seconds(lambda s=state, k=keep, a=axes: [t.index_select(x, k) for t, x in zip(s, a, strict=True)]),  # type: ignore[misc]
            "floor": max(moved / base["copy_bytes_per_second"], base["empty_launch_seconds"]),
        }
        found.append(row)
    print(table([("rows", "gather us", "torch", "floor"),
                 *[(str(r["rows"]), micro(r["gather"]), micro(r["torch"]), micro(r["floor"])) for r in found]]))  # fmt: skip
    return found


# ------------------------------------------------------------------ cascades


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Network(nn.Module):
    """Token ids or pictures, equal blocks of layers, a linear exit after each."""

    def __init__(self, kind: str, width: int, heads: int, layers: int, blocks: int, tokens: int, classes: int) -> None:
        super().__init__()
        self.kind, self.tokens, self.classes = kind, tokens, classes
        self.patch = round(tokens**0.5)
        self.embed = nn.Embedding(1000, width) if kind == "text" else nn.Conv2d(3, width, 16, 16)
        each = layers // blocks
        self.blocks = nn.ModuleList(nn.Sequential(*[Layer(width, heads) for _ in range(each)]) for _ in range(blocks))
        self.heads = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes)) for _ in range(blocks))

    def start(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed(x)
        return found if self.kind == "text" else found.flatten(2).transpose(1, 2)

    def inputs(self, rows: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        if self.kind == "text":
            return rng.integers(0, 1000, (rows, self.tokens))
        side = 16 * self.patch
        dtype = np.float32 if CHECK else np.float16
        # Few different pictures, each a little different: making them would take longer than running them.
        few = rng.standard_normal((min(rows, 64), 3, side, side)).astype(dtype)
        return np.concatenate([few * dtype(1 + k / 64) for k in range(-(-rows // len(few)))])[:rows]


class Part:
    """Blocks first…last as a program: what `TorchGraphs` otherwise reads from a bundle."""

    def __init__(self, network: Network, first: int, last: int) -> None:
        self.network, self.first, self.last = network, first, last
        self.inputs = ("x" if first == 0 else f"state_{first - 1}",)

    def run(self, feed: Mapping[str, torch.Tensor], outputs: Any) -> tuple[dict[str, torch.Tensor], None]:
        with torch.no_grad():
            state = feed[self.inputs[0]]
            state = self.network.start(state) if self.first == 0 else state
            for block in self.network.blocks[self.first : self.last + 1]:
                state = block(state)
            made = {f"state_{self.last}": state.contiguous()}
            if f"logits_{self.last}" in outputs:
                made[f"logits_{self.last}"] = self.network.heads[self.last](state.mean(1))
            return {name: made[name] for name in outputs}, None


class ModuleGraphs(TorchGraphs):
    """The torch executor over modules instead of a bundle's files: same lanes, captures, gate and gather."""

    def __init__(self, network: Network) -> None:
        self._parts = network
        super().__init__(None, DEVICE)  # type: ignore[arg-type]

    def program(self, graph: Any) -> Any:
        first, last = (int(part) for part in graph.file.split("_"))
        return Part(self._parts, first, last)


def manifest_of(network: Network) -> Manifest:
    """The network's description, as an export would have written it."""
    count, width = len(network.blocks), network.heads[0][1].in_features
    of_row = (
        ["batch", network.tokens] if network.kind == "text" else ["batch", 3, 16 * network.patch, 16 * network.patch]
    )
    floats = str(network.heads[0][1].weight.dtype).removeprefix("torch.")
    parts: dict[tuple[int, int], dict[str, Any]] = {}
    for first in range(count):
        for last in range(first, count):
            parts[first, last] = {
                "file": f"{first}_{last}",
                "inputs": ["x" if first == 0 else f"state_{first - 1}"],
                "outputs": [f"state_{last}", f"logits_{last}", f"label_{last}", f"score_{last}"],
                "exit": last,
                "flops": f"batch*{last + 1 - first}",
                "bytes": "batch",
                "params": 0,
            }
    return Manifest(
        schema="offramp/1", name=network.kind, version="1", created="", producer="benchmarks/gpu.py",
        classes=[str(k) for k in range(network.classes)],
        inputs=[Input(name="x", dtype="int64" if network.kind == "text" else floats, shape=of_row)],
        tensors={f"state_{k}": Tensor(dtype=floats, shape=["batch", network.tokens, width], batch_axis=0) for k in range(count)},
        blocks=[Block(**parts[k, k]) for k in range(count)],
        segments=[Segment(**part, first=a, last=b) for (a, b), part in parts.items() if a < b],
        exits=[Exit(name=str(k), block=k, logits=f"logits_{k}", label=f"label_{k}", score=f"score_{k}") for k in range(count)],
        files={}, digest="",
    )  # fmt: skip


class WholeModel:
    """The rival: the whole network as one CUDA graph, two batches in flight, labels to the host."""

    def __init__(self, network: Network, batch: int) -> None:
        last, self.batch = len(network.blocks) - 1, batch
        part = Part(network, 0, last)
        example = torch.from_numpy(network.inputs(batch))
        self.lanes = []
        for _ in range(2):
            pinned = torch.empty_like(example, pin_memory=not CHECK)
            given = example.to(DEVICE)
            labels = torch.empty(batch, dtype=torch.int64, pin_memory=not CHECK)

            def run(given: torch.Tensor = given) -> torch.Tensor:
                return part.run({"x": given}, (f"logits_{last}",))[0][f"logits_{last}"].argmax(1)

            if CHECK:
                self.lanes.append((None, pinned, given, labels, run, None, None))
                continue
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                run()
                with torch.cuda.graph(graph, stream=stream):
                    made = run()
            self.lanes.append((stream, pinned, given, labels, lambda g=graph, m=made: (g.replay(), m)[1], graph, torch.cuda.Event()))  # type: ignore[misc] # fmt: skip

    def predict(self, x: np.ndarray) -> np.ndarray:
        answers, waiting = np.empty(len(x), np.int64), []
        for number, start in enumerate(range(0, len(x), self.batch)):
            stream, pinned, given, labels, run, _, event = self.lanes[number % 2]
            if len(waiting) == 2:
                self._collect(answers, *waiting.pop(0))
            pinned.copy_(torch.from_numpy(x[start : start + self.batch]))
            if stream is None:
                given.copy_(pinned)
                labels.copy_(run())
            else:
                with torch.cuda.stream(stream):
                    given.copy_(pinned, non_blocking=True)
                    labels.copy_(run(), non_blocking=True)
                    event.record()
            waiting.append((start, labels, event))
        for one in waiting:
            self._collect(answers, *one)
        return answers

    def _collect(self, answers: np.ndarray, start: int, labels: torch.Tensor, event: Any) -> None:
        if event is not None:
            event.synchronize()
        answers[start : start + self.batch] = labels.numpy()


def cascades() -> list[dict[str, Any]]:
    """Rows a second of the whole model and of the cascade at forced mixes, waiting for the hardest and compacting."""
    if CHECK:
        models = {
            "minilm": (Network("text", 16, 2, 4, 4, 6, 5), (8,)),
            "vit": (Network("pictures", 16, 2, 4, 4, 4, 5), (6,)),
        }
    else:
        models = {
            "MiniLM-L6, 32 tokens": (Network("text", 384, 12, 6, 6, 32, 150), (32, 256, 1024)),
            "ViT-B/16, 196 patches": (Network("pictures", 768, 12, 12, 4, 196, 1000), (32, 256)),
        }
    found = []
    for name, (network, batches) in models.items():
        network = network.eval().to(DEVICE, torch.float32 if CHECK else torch.float16)
        for batch in batches:
            if left() < 25 and not CHECK:
                print(f"  {name}, batch {batch} left out: no time")
                continue
            found += mixes(name, network, batch)
    return found


def mixes(name: str, network: Network, batch: int) -> list[dict[str, Any]]:
    manifest, count = manifest_of(network), len(network.blocks)
    executor = DeviceExecutor(Bundle(Path(), manifest), ModuleGraphs(network))
    x, middle = network.inputs(4 * batch), count // 2 - 1
    whole = WholeModel(network, batch)

    def predict(point: OperatingPoint, warm: bool = False) -> Any:
        route = Route(manifest, Gate(point, count))
        if warm:
            executor.warm_up(route.out_of_reach(), {}, batch)
        return executor.answer(Call(route, {"x": x}, {"batch": len(x)}, limit=batch), again=str)

    nobody = (np.inf,) * (count - 1)
    at_middle = OperatingPoint((*[np.inf] * middle, -np.inf, *[-np.inf] * (count - middle - 1)))
    score = predict(at_middle).score
    points = {
        "no exits, one graph": OperatingPoint((*nobody, -np.inf)),
        # A share leaves, but the batch goes on until its last row may: that's every block for the whole batch.
        "waits for the hardest": OperatingPoint((*[np.inf] * middle, 1e38, *[np.inf] * (count - middle - 2), -np.inf)),
        "all exits, nobody leaves": OperatingPoint((*[1e38] * (count - 1), -np.inf)),
    }
    for share in (0.25, 0.5, 0.75):
        bar = float(np.quantile(score, 1 - share))
        points[f"{share:.0%} leave"] = OperatingPoint(
            (*[np.inf] * middle, bar, *[np.inf] * (count - middle - 2), -np.inf)
        )
    labels = predict(points["no exits, one graph"], warm=True).label
    agreement = float((whole.predict(x) == labels).mean())
    variants: dict[str, Callable[[], Any]] = {"whole model": lambda: whole.predict(x)}
    for label, point in points.items():
        predict(point, warm=True)
        variants[label] = lambda p=point: predict(p)  # type: ignore[misc]
    times: dict[str, list[float]] = {label: [] for label in variants}
    started = time.perf_counter()
    for _ in range(2 if CHECK else 40):
        for label in np.random.default_rng().permutation(list(variants)):
            before = time.perf_counter()
            variants[label]()  # its answers are on the host when it returns
            times[label].append(time.perf_counter() - before)
        if time.perf_counter() - started > 6:
            break
    base = float(np.median(times["whole model"]))
    rows = [
        {
            "model": name,
            "batch": batch,
            "variant": label,
            "rows_per_second": len(x) / float(np.median(t)),
            "time / whole model": float(np.median(t)) / base,
            "left early": float((predict(points[label]).exit == middle).mean()) if label in points else 0.0,
            "labels agree": agreement,
        }
        for label, t in times.items()
    ]
    print(table([("model", "batch", "variant", "rows/s", "time / whole", "left early"),
                 *[(name, str(batch), r["variant"], f"{r['rows_per_second']:.0f}", f"{r['time / whole model']:.3f}", f"{r['left early']:.0%}") for r in rows]]))  # fmt: skip
    executor.close()
    return rows


def card() -> dict[str, Any]:
    """The GPU and the versions that matter for it."""
    versions = {}
    for name in ("triton", "onnxruntime-gpu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if CHECK:
        return {"card": "none: control flow only", "versions": versions}
    about = torch.cuda.get_device_properties(0)
    return {
        "card": about.name,
        "capability": f"{about.major}.{about.minor}",
        "processors": about.multi_processor_count,
        "memory_bytes": about.total_memory,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-check", action="store_true", help="run every step at toy sizes on CPU; nothing is kept")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes half the time")
    args = parser.parse_args()
    if not CHECK and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here. `--cpu-check` runs the same steps at toy sizes without one.")
    torch.manual_seed(0)
    results: dict[str, Any] = {"card": card()}
    print(results["card"], machine()["versions"])

    def keep(name: str, value: Any) -> None:
        results[name] = value
        if not CHECK:
            save("gpu", results)  # what is measured is kept, whatever comes after

    keep("worst difference to float64", correctness())
    print("worst difference to float64 (relative above 1):", results["worst difference to float64"])
    base = baselines()
    keep("baselines", base)
    print(f"copy {base['copy_bytes_per_second'] / 1e9:.0f} GB/s, empty launch {micro(base['empty_launch_seconds'])} us")
    keep("cascades", cascades())
    keep("gather", gather_table(base))
    keep("gate", gate_table(base, compiles=not args.no_compile))
    print(f"{time.perf_counter() - STARTED:.0f} s" + ("" if CHECK else f", kept in {save('gpu', results)}"))


if __name__ == "__main__":
    main()
