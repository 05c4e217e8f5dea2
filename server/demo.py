"""offramp demo: a real server over the intents that ship with offramp, asked in sentences, against one plain session.

Everything is said in milliseconds and rows a second, measured now, on this machine, taking turns.
"""

import argparse
import http.client
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offramp.runtime import Cascade, sample
from offramp.runtime.errors import InputError, OfframpError
from offramp.runtime.execution.cpu.session import AWAKE, available_threads
from offramp.runtime.jobs.benching.plain import plain_sessions
from offramp.runtime.points import FULL
from offramp.server.load.serving import serving

POINT = "fast"
_TOGETHER = 64  # sentences a request
_SENTENCES, _OTHERS, _ALONE = 2240, 500, 200  # of each kind, so that it takes some ten seconds
_WIDTH = 40  # of a bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="stop when the numbers are printed")
    parser.add_argument("--port", type=int, default=0, help="port to serve on (default: a free one)")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.port <= 65535:
        raise InputError(f"--port is {args.port}, expected 0 to 65535.")
    # As for Ctrl-C: the server is ended and its files go, whoever ends the demo.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    known, others = sample.sentences()
    known = known[:: len(known) // _SENTENCES][:_SENTENCES]
    others = others[:: len(others) // _OTHERS][:_OTHERS]
    with tempfile.TemporaryDirectory() as scratch:
        bundle = sample.intents(Path(scratch) / "intents")
        with Cascade.load(bundle, spin_us=AWAKE) as cascade:
            print(_about(cascade), flush=True)
            alone = _in_the_program(cascade, [text for text, _ in known[:_ALONE]])
            promised = _promised(cascade)
        with serving(bundle, port=args.port, options=["--operating-point", POINT]) as address:
            print(
                f"serving it; sending {len(known):,} held-out sentences over HTTP, {_TOGETHER} a request and singly, "
                f"and {len(others)} that ask for none of these intents …\n",
                flush=True,
            )
            results = _ask(address, [text for text, _ in known], others)
            truth = [intent for _, intent in known]
            print(_picture(alone, results))
            print(_kept(results, truth, promised))
            if args.once:
                return 0
            print(f"type a sentence of your own: {address}/try   (live numbers: {address}/, API: {address}/docs)")
            print("Ctrl-C ends it.", flush=True)
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                print()
                return 0


def _about(cascade: Cascade) -> str:
    exits = len(cascade.exits)
    return (
        f"{cascade.manifest.name}: which of {len(cascade.classes)} things an English sentence asks for; a small BERT "
        f"with {exits} exits.\nplain: the whole network as one ONNX Runtime session. offramp: its operating point "
        f"{POINT!r}."
    )


def _promised(cascade: Cascade) -> dict[str, float]:
    """What calibration promised of the point: the largest drop of accuracy, and the risk among answered rows."""
    provenance = cascade.calibration.point(POINT).provenance
    return {"drop": float(provenance["target"]["drop"]), "risk": float(provenance["abstention"]["risk"])}


def _in_the_program(cascade: Cascade, texts: list[str]) -> dict[str, list[float]]:
    """Milliseconds a sentence in one's own program, from token ids to an answer, by who gives it."""
    point = cascade.at(POINT)
    runs = {f"plain, {name}": run for name, run in plain_sessions(cascade.bundle, available_threads())[0].items()}

    def early(inputs: Any) -> object:
        out = point.predict(inputs)
        return out.label, out.abstain  # looked at: they are made out only then

    runs["offramp"] = early
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for text in texts:
        inputs = cascade.preprocess([text])
        for name, one in runs.items():
            started = time.perf_counter()
            one(inputs)
            spent[name].append((time.perf_counter() - started) * 1e3)
    best = min((name for name in runs if name != "offramp"), key=lambda name: statistics.median(spent[name]))
    return {"plain": spent[best], "offramp": spent["offramp"]}


@dataclass
class _Result:
    """The answers of one operating point, and what each kind of request took, in milliseconds."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    def right(self, truth: list[str]) -> list[bool]:
        return [answer["class"] == intent for answer, intent in zip(self.answers, truth, strict=True)]


class _Client:
    """One connection that is kept, as a busy client's is."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)

    def post(self, rows: list[str], point: str) -> tuple[list[dict[str, Any]], float]:
        """The answers, and the milliseconds until they were there."""
        body = json.dumps({"instances": rows, "operating_point": point}).encode()
        started = time.perf_counter()
        self._connection.request("POST", "/v1/predict", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        took = (time.perf_counter() - started) * 1e3
        if response.status != 200:
            raise OfframpError(f"the server answered {response.status}: {data[:300].decode(errors='replace')}")
        return json.loads(data)["predictions"], took


def _ask(address: str, known: list[str], others: list[str]) -> dict[str, _Result]:
    """Every sentence at both points, in turn, so that what the machine does meanwhile hits both alike.

    At `full` the server runs the very graph of the plain session.
    """
    results, client = {FULL: _Result(), POINT: _Result()}, _Client(address)
    for rows in (known[:_TOGETHER], known[:1]):
        for name in results:
            client.post(rows, name)
    for start in range(0, len(known), _TOGETHER):
        for name, result in results.items():
            answers, took = client.post(known[start : start + _TOGETHER], name)
            result.answers += answers
            result.together.append(took)
    for text in known[:_ALONE]:
        for name, result in results.items():
            result.alone.append(client.post([text], name)[1])
    for start in range(0, len(others), _TOGETHER):
        for name, result in results.items():
            result.others += client.post(others[start : start + _TOGETHER], name)[0]
    return results


def _picture(alone: dict[str, list[float]], results: dict[str, _Result]) -> str:
    """Bars: a pair for each way of asking."""
    whole, early = results[FULL], results[POINT]
    lines = [
        *_bars("one sentence, in your program", statistics.median(alone["plain"]), statistics.median(alone["offramp"])),
        *_bars("one sentence, over HTTP", statistics.median(whole.alone), statistics.median(early.alone)),
        *_bars(
            f"{_TOGETHER} sentences a request, over HTTP",
            1e3 * len(whole.answers) / sum(whole.together),
            1e3 * len(early.answers) / sum(early.together),
            unit="rows/s",
        ),
    ]
    return "\n".join(lines)


def _bars(title: str, plain: float, offramp: float, unit: str = "ms") -> list[str]:
    more, less = max(plain, offramp), min(plain, offramp)
    form = "{:8.2f} ms    " if unit == "ms" else "{:8,.0f} rows/s"
    lines = [f"{title}: {more / less:.1f} times {'faster' if (plain > offramp) == (unit == 'ms') else 'slower'}"]
    for name, value in (("plain", plain), ("offramp", offramp)):
        lines.append(f"  {name:<8}{form.format(value)}  {'█' * max(1, round(_WIDTH * value / more))}")
    return [*lines, ""]


def _kept(results: dict[str, _Result], truth: list[str], promised: dict[str, float]) -> str:
    """What was promised against what came out, and where sentences left."""
    whole, early = results[FULL], results[POINT]
    # In points, as they are printed, so that what is lost is the difference of what stands beside it.
    accuracy = {name: round(100 * _share(result.right(truth)), 2) for name, result in results.items()}
    answered = [ok for ok, answer in zip(early.right(truth), early.answers, strict=True) if not answer["abstain"]]
    rows = [
        ("", "plain", "offramp", "promised"),
        ("accuracy", f"{accuracy[FULL]:.2f}%", f"{accuracy[POINT]:.2f}%", ""),
        (
            "points lost",
            "-",
            f"{accuracy[FULL] - accuracy[POINT]:.2f}",
            f"at most {100 * promised['drop']:.2f}",
        ),
        ("error among the answered", "-", f"{1 - _share(answered):.2%}", f"at most {promised['risk']:.2%}"),
        ("abstains", "-", f"{_share([a['abstain'] for a in early.answers]):.1%}", ""),
        ("abstains on other topics", "-", f"{_share([a['abstain'] for a in early.others]):.1%}", ""),
        (
            "FLOPs",
            "100.0%",
            f"{sum(a['flops'] for a in early.answers) / sum(a['flops'] for a in whole.answers):.1%}",
            "",
        ),
    ]
    exits = sorted({(a["exit"], a["exit_name"]) for a in early.answers})
    lines = [f"{a:<28}{b:>10}{c:>10}  {d}".rstrip() for a, b, c, d in rows]
    left = ", ".join(f"{_share([a['exit'] == j for a in early.answers]):.1%} at {name}" for j, name in exits)
    return "\n".join([*lines, f"sentences leave: {left}", ""])


def _share(values: list[bool]) -> float:
    return sum(values) / len(values) if values else 0.0
