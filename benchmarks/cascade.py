"""Do saved FLOPs become saved time? The cascade against the whole network in one ONNX Runtime session.

    python benchmarks/cascade.py [--threads 1 2] [--seconds 20] [--quick]

The model is MiniLM on CLINC150 (../shared). Its rival is the same network exported as one graph that gives the
last exit's logits, in a session at whichever settings are fastest in this run. Everything takes turns in random
order; ratios are formed within a round; intervals are bootstrap, 95%.
"""

import argparse
import importlib.util
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from harness import Timing, machine, ratio, save, take_turns
from offramp.runtime import Cascade, OperatingPoint, thresholds
from offramp.runtime.execution.cpu import session
from offramp.runtime.execution.cpu.executor import CpuExecutor

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
INPUTS = ("input_ids", "attention_mask")
Inputs = dict[str, np.ndarray]


def load_model_file() -> Any:
    path = SHARED / "models" / "minilm_clinc150" / "model.py"
    if not path.exists():
        raise SystemExit("../shared/models/minilm_clinc150 isn't here: this benchmark needs a real model.")
    spec = importlib.util.spec_from_file_location("minilm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export(folder: Path) -> tuple[Path, Path]:
    """The bundle, and the monolith: one graph from the inputs to the last exit's logits."""
    import torch
    from offramp.export import export_bundle

    file = load_model_file()
    model = file.build()

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids, attention_mask)[-1]

    bundle = export_bundle(
        model, file.example_inputs(), folder / "bundle", dynamic_axes=file.dynamic_axes(), classes=file.classes()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Last().eval(),
            (),
            kwargs=file.example_inputs(),
            dynamo=True,
            dynamic_shapes=file.dynamic_axes(),
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None
    program.save(folder / "monolith.onnx", external_data=True)
    return bundle, folder / "monolith.onnx"


def monoliths(path: Path, threads: int) -> dict[str, Any]:
    """The rival at three settings: without spinning, and with everything that our sessions have.

    As it comes, ONNX Runtime spins on for some 30 ms after each run and takes a core away from whatever is
    measured next: that setting is timed alone (`spinning_alone`), never in turns.
    """
    sessions = {}
    for name, spin in (("no spinning", ""), ("brief spinning", "50"), ("longer spinning", "200")):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        if not spin:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        else:
            options.add_session_config_entry("session.intra_op.spin_duration_us", spin)
            if session.use_shared_arena():
                options.enable_mem_pattern = False
                options.add_session_config_entry("session.use_env_allocators", "1")
        sessions[name] = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return sessions


def spinning_alone(path: Path, threads: int, work: list[Inputs]) -> float:
    """Median milliseconds a batch of the rival as it comes, with the process to itself."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    one = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    timing = take_turns({"alone": over(work, lambda x: one.run(["logits"], x))}, rounds=100, seconds=2)["alone"]
    time.sleep(0.1)  # until its threads have stopped spinning
    return timing.median / len(work) * 1e3


def rows_of(split: str) -> tuple[Inputs, np.ndarray]:
    with np.load(SHARED / "data" / "clinc150" / f"{split}.npz") as archive:
        return {name: archive[name] for name in INPUTS}, archive["labels"]


def batches(data: Inputs, size: int, count: int, seed: int = 0) -> list[Inputs]:
    """Batches of rows of similar length, each cut to its longest row; `count` of them, spread over all lengths."""
    lengths = data["attention_mask"].sum(axis=1)
    order = np.argsort(lengths + np.random.default_rng(seed).random(len(lengths)) * 0.5)
    starts = np.linspace(0, len(order) - size, min(count, len(order) // size)).astype(int)
    made = []
    for start in starts:
        rows = order[start : start + size]
        longest = int(lengths[rows].max())
        made.append({name: np.ascontiguousarray(data[name][rows, :longest]) for name in INPUTS})
    return made


def best_monolith(sessions: dict[str, Any], timings: dict[str, Timing]) -> str:
    return min(sessions, key=lambda name: timings[f"monolith, {name}"].median)


def over(work: list[Inputs], run: Callable[[Inputs], Any]) -> Callable[[], None]:
    def all_of_it() -> None:
        for inputs in work:
            run(inputs)

    return all_of_it


def monolith_runs(sessions: dict[str, Any], work: list[Inputs]) -> dict[str, Callable[[], None]]:
    return {
        f"monolith, {name}": over(work, lambda x, s=one: s.run(["logits"], x))  # type: ignore[misc]
        for name, one in sessions.items()
    }


def answers_of(cascade: Cascade) -> Callable[[Inputs], Any]:
    """Asks, and looks at what it's told: answers are made out only then."""

    def ask(inputs: Inputs) -> Any:
        out = cascade.predict(inputs)
        return out.label, out.abstain

    return ask


def overhead(
    cascade: Cascade,
    sessions: dict[str, Any],
    data: Inputs,
    sizes: list[int],
    seconds: float,
    alone: dict[int, float],
) -> list[Any]:
    """Nothing leaves: as one graph (thresholds +inf), and through all six blocks and gates (out of reach)."""
    chain = cascade.at(OperatingPoint((*[1e6] * 5, -math.inf)))
    found = []
    for size in sizes:
        work = batches(data, size, 1 if size > 8 else 8)
        variants = monolith_runs(sessions, work)
        variants |= {"one graph": over(work, answers_of(cascade)), "six blocks": over(work, answers_of(chain))}
        timings = take_turns(variants, rounds=400, seconds=seconds)
        rival = best_monolith(sessions, timings)
        base = timings[f"monolith, {rival}"]
        row = {"batch": size, "rival": rival, "monolith_ms": base.median / len(work) * 1e3, "spinning_ms": alone[size]}
        for name in ("one graph", "six blocks"):
            row[name] = ratio(timings[name], base)
            row[f"{name}, cpu"] = ratio(timings[name], base, kind="cpu")
        found.append(row)
        print(
            f"  batch {size:<4} {rival} {row['monolith_ms']:.2f} ms (spinning, alone {alone[size]:.2f})  "
            f"one graph {row['one graph']}  six blocks {row['six blocks']}",
            flush=True,
        )
    return found


def mixes(cascade: Cascade, sessions: dict[str, Any], data: Inputs, sizes: list[int], seconds: float) -> list[Any]:
    """A forced share of each batch leaves after half the blocks; with compaction, and waiting for the hardest row."""
    found = []
    for size in sizes:
        work = batches(data, size, 1)
        score = cascade.record(work[0]).score[2]
        for share in (0.0, 0.25, 0.5, 0.75):
            bar = float(np.sort(score)[::-1][max(0, round(share * size) - 1)]) if share else 1e6
            point = OperatingPoint((math.inf, math.inf, bar, math.inf, math.inf, -math.inf))
            at = cascade.at(point)
            spent = at.predict(work[0])
            left = float((spent.exit == 2).mean())
            variants = monolith_runs(sessions, work)
            variants |= {"compaction": over(work, answers_of(at)), "waits": over(work, lambda x, at=at: wait(at, x))}  # type: ignore[misc]
            timings = take_turns(variants, rounds=200, seconds=seconds / 2)
            rival = best_monolith(sessions, timings)
            base = timings[f"monolith, {rival}"]
            whole = float(cascade.row_flops({"seq": work[0]["input_ids"].shape[1]})[-1])
            row = {
                "batch": size,
                "leave": left,
                "flops": float(spent.flops.mean()) / whole,
                "compaction": ratio(timings["compaction"], base),
                "wait for hardest": ratio(timings["waits"], base),
            }
            found.append(row)
            print(
                f"  batch {size:<4} {left:>4.0%} leave: FLOPs {row['flops']:.2f}  time with compaction "
                f"{row['compaction']}  waiting {row['wait for hardest']}",
                flush=True,
            )
    return found


def wait(cascade: Cascade, inputs: Inputs) -> None:
    """What toolkits do: the whole batch goes on until its last row may leave."""
    state: dict[str, Any] = dict(inputs)
    manifest, point = cascade.manifest, cascade.operating_point
    waiting = np.ones(len(inputs["input_ids"]), np.bool_)
    steps = cascade.route.steps(logits=False, routing=False)
    for k, stage in enumerate(cascade.route.stages):
        made = cascade.executor.run(stage.graph, state, steps[k].outputs)
        state |= made
        assert stage.exit is not None
        waiting &= made[manifest.exits[stage.exit].score] < point.thresholds[stage.exit]
        if not waiting.any():
            return


def real_rows(
    cascade: Cascade,
    sessions: dict[str, Any],
    val: Inputs,
    test: Inputs,
    labels: np.ndarray,
    sizes: list[int],
    seconds: float,
    threads: int,
) -> list[Any]:
    """Real rows at exit-share thresholds (q = .45, from validation): realised against promised speed-up."""
    at = cascade.at(OperatingPoint(share_thresholds(cascade, val, 0.45)))
    full, early = cascade.predict(test), at.predict(test)
    accuracy = [float((answer.label == labels).mean()) for answer in (full, early)]
    print(f"  accuracy: full {accuracy[0]:.4f}, with exits {accuracy[1]:.4f}")
    found = []
    for size in sizes:
        work = batches(test, size, max(4, 256 // size) if size < 512 else 4)
        answers = [at.predict(x) for x in work]
        flops = sum(int(a.flops.sum()) for a in answers)
        whole = sum(len(x["input_ids"]) * int(cascade.row_flops({"seq": x["input_ids"].shape[1]})[-1]) for x in work)
        variants = monolith_runs(sessions, work) | {"cascade": over(work, answers_of(at))}
        timings = take_turns(variants, rounds=100, seconds=seconds)
        rival = best_monolith(sessions, timings)
        speed_up = ratio(timings[f"monolith, {rival}"], timings["cascade"])
        promised = whole / flops
        parts = sum_of_blocks(at, work, threads)
        row = {
            "batch": size,
            "rival": rival,
            "promised": promised,
            "realised": speed_up,
            "realised / promised": speed_up.value / promised,
            "blocks / cascade": parts / timings["cascade"].median,
        }
        found.append(row)
        print(
            f"  batch {size:<4} promised {promised:.2f}x  realised {speed_up}x  "
            f"ratio {row['realised / promised']:.3f}  sum of blocks / cascade {row['blocks / cascade']:.3f}",
            flush=True,
        )
    return [{"accuracy_full": accuracy[0], "accuracy_exits": accuracy[1]}, *found]


def share_thresholds(cascade: Cascade, val: Inputs, q: float) -> tuple[float, ...]:
    score = cascade.record(val).score
    return thresholds.thresholds_for_shares(score, thresholds.geometric_shares(len(score), math.log(q)))


class Watched(CpuExecutor):
    """Keeps what every block was run on."""

    calls: list[tuple[Any, Any, list[str]]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls = []

    def run(self, graph: Any, state: Any, outputs: Any) -> Any:
        self.calls.append((graph, dict(state), list(outputs)))
        return super().run(graph, state, outputs)


def sum_of_blocks(cascade: Cascade, work: list[Inputs], threads: int, repeats: int = 15) -> float:
    """Seconds of the blocks alone, each a session of its own, at the very states that ran; medians of repeated runs."""
    executor = Watched(cascade.bundle, threads=threads, providers=["CPUExecutionProvider"], cascade_graph=False)
    in_series = Cascade(cascade.bundle, cascade.calibration, cascade.operating_point, executor)
    for inputs in work:
        in_series.predict(inputs)
    calls, executor.calls = executor.calls, []
    passes = []
    for _ in range(repeats):
        started = time.perf_counter()
        for graph, state, outputs in calls:
            CpuExecutor.run(executor, graph, state, outputs)
        passes.append(time.perf_counter() - started)
    executor.close()
    return float(np.median(passes))


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for threads, found in results.items():
        rows = found["real rows"][1:]
        axes[0].plot(
            [r["batch"] for r in rows], [r["realised"].value for r in rows], "o-", label=f"realised, {threads}"
        )
        axes[0].plot(
            [r["batch"] for r in rows], [r["promised"] for r in rows], "--", label=f"promised by FLOPs, {threads}"
        )
        largest = max(r["batch"] for r in found["mixes"])
        mixed = [r for r in found["mixes"] if r["batch"] == largest]
        for name, style in (("compaction", "o-"), ("wait for hardest", "s:")):
            axes[1].plot([r["leave"] for r in mixed], [r[name].value for r in mixed], style, label=f"{name}, {threads}")
        axes[1].plot([r["leave"] for r in mixed], [r["flops"] for r in mixed], "k--", alpha=0.4)
    axes[0].set(
        xscale="log", xlabel="rows in a batch", ylabel="speed-up over the monolith", title="CLINC150 test rows, q = .45"
    )
    axes[1].set(
        xlabel="share that leaves after half", ylabel="time / monolith", title="forced exit mixes (dashed: FLOPs)"
    )
    for axis in axes:
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, session.available_threads()])
    parser.add_argument("--seconds", type=float, default=20, help="about how long each comparison takes (default: 20)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, two seconds each: a check, not a result")
    args = parser.parse_args()
    seconds = 2.0 if args.quick else args.seconds
    sizes = [1, 32] if args.quick else [1, 8, 32, 128]
    real_sizes = [1, 32] if args.quick else [1, 32, 128, 512]
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']:.2f}, {about['versions']}")
    (val, _), (test, labels) = rows_of("val"), rows_of("test")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        bundle, monolith = export(Path(scratch))
        results: dict[str, Any] = {}
        for threads in dict.fromkeys(args.threads):
            work = {size: batches(test, size, 1 if size > 8 else 8) for size in sizes}
            alone = {size: spinning_alone(monolith, threads, inputs) for size, inputs in work.items()}
            sessions = monoliths(monolith, threads)
            # As for any traffic without pauses; the rival has its best of three.
            with Cascade.load(bundle, threads=threads, spin_us=session.AWAKE) as cascade:
                name = f"{threads} thread{'s' if threads > 1 else ''}"
                print(f"{name}: nothing leaves, time over the monolith's")
                results[name] = {"overhead": overhead(cascade, sessions, test, sizes, seconds, alone)}
                save("cascade", results)  # what is measured is kept, whatever comes after
                print(f"{name}: forced mixes, time over the monolith's")
                results[name]["mixes"] = mixes(cascade, sessions, test, sizes[-2:], seconds)
                save("cascade", results)
                print(f"{name}: real rows, speed-up over the monolith")
                results[name]["real rows"] = real_rows(
                    cascade, sessions, val, test, labels, real_sizes, seconds, threads
                )
    path = save("cascade", results)
    plot(results, path.with_suffix(".png"))
    print(f"kept in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
