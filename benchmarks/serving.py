"""offramp against servers of the whole model, one row a request, all of them on this machine's CPU.

    python benchmarks/serving.py                       # everything: some twenty minutes on two cores
    python benchmarks/serving.py --peers fastapi mosec --turns 5
    make bench-serving

The model is the small BERT of `sample.intents`, the rows are held-out sentences as token ids, as long as they are.
offramp runs at `full`, and at the point that loses at most half a point of accuracy; the others run the same network as
one ONNX file, each with its own batching on, in the best of some settings. Servers are started anew for each turn.
Beside how much each carries: the CPU seconds that a request costs offramp's server and FastAPI's around a tiny
network, and how late `full` and the point with exits answer at 70% of what `full` carries.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from harness import machine, save
from offramp.runtime import Cascade, sample
from offramp.runtime.bundle import Bundle, read_bundle
from offramp.runtime.execution.stages import plan
from offramp.server.load import tools
from offramp.server.load.arrivals import poisson
from offramp.server.load.clients import OWN, Clients, Measured, clients
from offramp.server.load.connection import resolve
from offramp.server.load.requests import PREDICT, bodies, post
from serving.report import errors_of, lines_of, plot, told
from serving.rivals import CORES, PEERS
from serving.running import Missing, Server, labels_of, offramp
from serving.running import post as ask

FULL, FAST = "offramp, full", "offramp, fast"
_ROWS = 1000


OFFRAMP: list[list[str]] = [[], ["--lanes", str(CORES), "--threads", "1"], ["--workers", str(CORES)]]


def whole_model(bundle: Bundle, path: Path) -> Path:
    """The last exit of a bundle as one ONNX file from inputs to logits: no early head, no gate."""
    stages = plan(bundle.manifest, [len(bundle.manifest.exits) - 1])
    if len(stages) != 1:
        sys.exit(f"{bundle.path} has no graph of the whole network.")
    model = onnx.load(bundle.file(stages[0].graph.file))
    logits = bundle.manifest.exits[-1].logits
    wanted, kept = {logits}, []
    for node in reversed(model.graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            kept.append(node)
    inputs = {given.name for given in bundle.manifest.inputs}
    for field, keep in (
        (model.graph.node, list(reversed(kept))),
        (model.graph.input, [one for one in model.graph.input if one.name in inputs]),
        (model.graph.output, [one for one in model.graph.output if one.name == logits]),
        (model.graph.initializer, [one for one in model.graph.initializer if one.name in wanted]),
    ):
        copies = [type(one).FromString(one.SerializeToString()) for one in keep]
        del field[:]
        field.extend(copies)
    onnx.save(model, path)
    return path


def intents(folder: Path) -> tuple[Path, list[bytes]]:
    """The intents' bundle, and sentences as JSON rows of token ids."""
    path = sample.intents(folder / "intents")
    texts = [text for text, _ in sample.sentences()[0]]
    picks = np.random.default_rng(0).permutation(len(texts))[:_ROWS]
    with Cascade.load(path) as cascade:
        rows = [cascade.preprocess([texts[k]]) for k in picks]
    return path, [json.dumps({name: array[0].tolist() for name, array in row.items()}).encode() for row in rows]


@dataclass
class Runner:
    """Somebody who takes a turn: a server to start, and what it is asked at each of its points."""

    points: dict[str, tuple[str, list[bytes]]]  # by name: path, bodies
    start: Callable[[Any], AbstractContextManager[Server]]
    settings: Sequence[Any]
    best: Any = None


@dataclass
class Asker:
    """Whoever does the closed loops: wrk if it is here, else our own processes."""

    own: Clients
    wrk: bool

    def closed(
        self, server: Server, path: str, sent: list[bytes], connections: int, seconds: float, warm: float
    ) -> Measured:
        url = f"http://127.0.0.1:{server.port}"
        if self.wrk:
            return tools.wrk(url, sent, connections, seconds=seconds, warm=warm, path=path)
        self.tell(server, path, sent)
        return self.own.closed("it", connections, seconds=seconds, warm=warm)

    def tell(self, server: Server, path: str, sent: list[bytes]) -> None:
        host = f"127.0.0.1:{server.port}"
        self.own.ask_with({"it": [post(host, path, body) for body in sent]}, resolve("127.0.0.1", server.port))


def runners(bundle: Path, model: Path, rows: list[bytes], names: Sequence[str], early: str) -> dict[str, Runner]:
    sent = {FULL: (PREDICT, bodies(rows, 1, "full")), FAST: (PREDICT, bodies(rows, 1, early))}
    found = {"offramp": Runner(sent, lambda options: offramp(bundle, options, PREDICT, sent[FULL][1][0]), OFFRAMP)}
    for peer in PEERS:
        if peer.name in names:
            points = {peer.title: (peer.path, [peer.body(row) for row in rows])}
            found[peer.name] = Runner(
                points, lambda setting, peer=peer: peer.serving(model, setting, rows[0]), peer.settings
            )
    return found


def prepared(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Peers that are installed, and why others aren't."""
    there, missing = [], {}
    for peer in PEERS:
        if peer.name in names:
            try:
                peer.install()
                there.append(peer.name)
            except Missing as error:
                missing[peer.name] = str(error)
    return there, missing


def tune(all_: dict[str, Runner], asker: Asker, connections: Sequence[int], seconds: float) -> dict[str, str]:
    """Each one's best setting, by requests a second; those that don't answer are taken out, and why."""
    missing = {}
    for name, runner in list(all_.items()):
        carried: list[float] = []
        trouble = ""
        for setting in runner.settings:
            try:
                with runner.start(setting) as server:
                    path, sent = next(iter(runner.points.values()))
                    found = [asker.closed(server, path, sent, count, seconds, seconds / 4) for count in connections]
                    rates = [one.carried / one.seconds for one in found]
                    carried.append(float(np.prod(rates)) ** (1 / len(rates)))
            except Missing as error:
                carried.append(0.0)
                trouble = str(error)
            print(f"  {name} {_said(setting)}: {carried[-1]:.0f} requests/s {trouble}", flush=True)
        runner.best = runner.settings[int(np.argmax(carried))]
        if not max(carried):
            missing[name] = trouble
            del all_[name]
    return missing


def _said(setting: Any) -> str:
    if isinstance(setting, dict):
        return " ".join(f"{name.lower()}={value}" for name, value in setting.items())
    return " ".join(setting) or "as it comes"


def take_turns(
    all_: dict[str, Runner], asker: Asker, connections: Sequence[int], turns: int, seconds: float
) -> Iterator[tuple[str, int, int, Measured]]:
    """(name, connections, turn, what was measured): every server is started anew for its turn."""
    order = list(all_)
    for turn in range(turns):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            runner = all_[name]
            try:
                with runner.start(runner.best) as server:
                    for count in connections:
                        for point, (path, sent) in runner.points.items():
                            yield point, count, turn, asker.closed(server, path, sent, count, seconds, 1.0)
            except Missing as error:
                print(f"  {name}, turn {turn + 1}: {error}", flush=True)


def agreement(all_: dict[str, Runner], count: int = 50) -> dict[str, float]:
    """The share of rows that each answers with the label that most do: all run the same network."""
    labels = {}
    for runner in all_.values():
        with runner.start(runner.best) as server:
            for point, (path, sent) in runner.points.items():
                labels[point] = [labels_of(ask(server.port, path, body)[1]) for body in sent[:count]]
    return {point: float(np.mean(np.equal(found, labels[FULL]))) for point, found in labels.items()}


def cpu_of_a_request(asker: Asker, folder: Path, seconds: float, turns: int) -> dict[str, Any]:
    """CPU milliseconds a request at eight connections, of offramp and of FastAPI around the same tiny network."""
    images = sample.heldout()[0][:200]
    rows = [json.dumps({"x": image.tolist()}).encode() for image in images]
    model = whole_model(read_bundle(sample.BUNDLE), folder / "digits.onnx")
    [peer] = [one for one in PEERS if one.name == "fastapi"]
    sent = bodies(rows, 1, "full")
    who = {
        "offramp": (lambda: offramp(sample.BUNDLE, ["--threads", "1"], PREDICT, sent[0]), PREDICT, sent),
        "fastapi": (lambda: peer.serving(model, {"WORKERS": 1, "THREADS": 1}, rows[0]), peer.path, rows),
    }
    spent: dict[str, list[float]] = {name: [] for name in who}
    for _ in range(turns):
        for name, (start, path, asked) in who.items():
            with start() as server:
                asker.tell(server, path, asked)
                asker.own.closed("it", 8, seconds=1.0, warm=0.0)
                before = server.cpu_seconds()
                found = asker.own.closed("it", 8, seconds=seconds, warm=0.0)
                spent[name].append((server.cpu_seconds() - before) * 1e3 / sum(found.outcomes.values()))
    ratios = [a / b for a, b in zip(spent["offramp"], spent["fastapi"], strict=True)]
    return {"ms": spent, "ratio": float(np.median(ratios)), "ratios": ratios}


def at_a_share_of_full(
    runner: Runner, asker: Asker, carried: float, share: float, seconds: float, turns: int
) -> dict[str, Any]:
    """How late both points answer while requests come at random, at a share of what `full` carries."""
    rate = share * carried
    late: dict[str, list[Measured]] = {name: [] for name in runner.points}
    with runner.start(runner.best) as server:
        for turn in range(turns):
            arrivals = poisson(rate, 1 + seconds, [0, turn])
            for name, (path, sent) in runner.points.items():
                asker.tell(server, path, sent)
                late[name].append(asker.own.open("it", arrivals, seconds=seconds, warm=1.0))
    return {
        "rate": rate,
        "share": share,
        **{
            f"p{q * 100:.0f}_ms": {name: [one.ms(q) for one in found] for name, found in late.items()}
            for q in (0.5, 0.99)
        },
        "errors": {name: errors_of(found) for name, found in late.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="*", default=names, choices=names, metavar="NAME", help=f"{', '.join(names)}")
    parser.add_argument("--connections", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--as-it-comes", action="store_true", help="try the first setting of each only")
    parser.add_argument("--out", type=Path, help="folder for results (default: benchmarks/results/DATE)")
    args = parser.parse_args()
    there, missing = prepared(args.peers)
    with tempfile.TemporaryDirectory() as scratch, clients() as own:
        folder = Path(scratch)
        bundle, rows = intents(folder)
        opened = read_bundle(bundle)
        model = whole_model(opened, folder / "whole.onnx")
        asker = Asker(own, "wrk" in tools.found())
        all_ = runners(bundle, model, rows, there, "fast")
        if args.as_it_comes:
            for runner in all_.values():
                runner.settings = runner.settings[:1]
        print(
            f"{opened.manifest.name}: {len(rows)} sentences; by {tools.WRK if asker.wrk else OWN}; settings:",
            flush=True,
        )
        missing |= tune(all_, asker, args.connections, min(2.0, args.seconds))
        if "offramp" in missing:
            sys.exit(f"offramp {missing['offramp']}")
        agree = agreement(all_)
        taken: dict[tuple[str, int], dict[int, Measured]] = {}
        for point, count, turn, found in take_turns(all_, asker, args.connections, args.turns, args.seconds):
            taken.setdefault((point, count), {})[turn] = found
            print(
                f"  turn {turn + 1}, {count} connections, {point}: {found.carried / found.seconds:,.0f}/s", flush=True
            )
        lines = lines_of(taken, args.connections)
        carried = max(line["requests_per_second"] for line in lines if line["server"] == FULL)
        if not carried:
            sys.exit(f"offramp at full answered nothing: {lines}")
        late = at_a_share_of_full(all_["offramp"], asker, carried, 0.7, args.seconds, args.turns)
        cpu = cpu_of_a_request(asker, folder, args.seconds, args.turns) if "fastapi" in there else None
    print(f"\n{told(lines, args.connections)}\n")
    print("same labels as full: " + ", ".join(f"{name} {share:.0%}" for name, share in agree.items()))
    for name, why in missing.items():
        print(f"not measured: {name} {why}")
    middle = {q: {name: float(np.median(each)) for name, each in late[q].items()} for q in ("p50_ms", "p99_ms")}
    print(f"open loop at {late['rate']:.0f} requests/s (70% of what full carries):")
    for q, found in middle.items():
        print(
            f"  {q[:3]}: full {found[FULL]:.1f} ms, fast {found[FAST]:.1f} ms, {found[FAST] / found[FULL]:.2f} of full"
        )
    if cpu is not None:
        spent = {name: float(np.median(each)) for name, each in cpu["ms"].items()}
        print(
            f"CPU of a request of the tiny network, 8 connections: offramp {spent['offramp']:.2f} ms, FastAPI "
            f"{spent['fastapi']:.2f} ms: {cpu['ratio']:.2f}x"
        )
    about = machine()
    results = {
        "lines": lines,
        "settings": {name: _said(runner.best) for name, runner in all_.items()},
        "versions": {peer.name: peer.version() for peer in PEERS if peer.name in there},
        "missing": missing,
        "same_labels": agree,
        "open_loop": late,
        "cpu_of_a_request": cpu,
    }
    if args.out is None:
        path = save("serving", results)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "serving.json"
        path.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    title = f"{opened.manifest.name} on {about['cpu']}, {about['cores']} cores"
    plot(lines, args.connections, path.with_suffix(".png"), str(about["date"])[:10], title)
    print(f"load {about['load']}; saved in {path}")


if __name__ == "__main__":
    main()
