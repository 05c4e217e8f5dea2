"""offramp predict"""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from offramp.runtime.cascade import Cascade
from offramp.runtime.cli.options import add_runtime
from offramp.runtime.jobs.data import read_shard, shards
from offramp.runtime.points import FULL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path, help=".npz, .npy or Parquet with the model's inputs, or a folder of them")
    parser.add_argument("--operating-point", default=FULL, help=f"one of the bundle's (default: {FULL})")
    parser.add_argument("--probabilities", action="store_true", help="print every class's probability, too")
    parser.add_argument("--allow-nonfinite", action="store_true", help="let NaN and infinity in float inputs pass")
    add_runtime(parser)


def run(args: argparse.Namespace) -> int:
    """One JSON object a row on stdout, a summary on stderr."""
    fetch = ("probabilities",) if args.probabilities else ()
    rows = abstained = spent = whole = 0
    with Cascade.load(args.bundle, args.device, args.operating_point, args.threads) as cascade:
        classes = cascade.classes
        for file in shards(args.data):
            shard = read_shard(file, cascade.manifest)
            out = cascade.predict(shard.inputs, fetch=fetch, allow_nonfinite=args.allow_nonfinite)
            for i in range(len(out)):
                label = int(out.label[i])
                line: dict[str, Any] = {
                    "label": label,
                    "class": classes[label] if label >= 0 else None,
                    "confidence": _number(out.confidence[i]),
                    "exit": int(out.exit[i]),
                    "abstain": bool(out.abstain[i]),
                    "flops": int(out.flops[i]),
                }
                if fetch:
                    line["probabilities"] = [_number(p) for p in out.probabilities[i]]
                sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            rows += len(out)
            abstained += int(out.abstain.sum())
            spent += int(out.flops.sum())
            whole += len(out) * int(cascade.row_flops(_sizes(cascade, shard.inputs))[-1])
    saved = 1 - spent / whole if whole else 0.0
    print(f"{rows} rows, {abstained} abstained, {saved:.1%} of the full model's FLOPs saved", file=sys.stderr)
    return 0


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _sizes(cascade: Cascade, inputs: dict[str, Any]) -> dict[str, int]:
    return {
        axis: inputs[given.name].shape[k]
        for given in cascade.manifest.inputs
        for k, axis in enumerate(given.shape)
        if isinstance(axis, str)
    }
