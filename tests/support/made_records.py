"""Records of a made-up model, for tests."""

import numpy as np
from offramp.runtime import Records, scores
from offramp.runtime.records import SCHEMA, Index, RecordsWriter


def made_up(rows=4000, exits=4, classes=5, seed=0, labels=True, sharp=1.0, gap=0.7):
    """Deeper exits are better. Calibrated at sharp = 1, over-confident above."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    gaps = gap * np.arange(1, exits + 1)
    logits = np.stack([g * (rng.standard_normal((rows, classes)) + g * np.eye(classes)[y]) for g in gaps])
    logits = (sharp * logits).astype(np.float32)
    return Records(
        logits=logits,
        score=np.stack([scores.log_odds(z) for z in logits]),
        label=logits.argmax(axis=2).astype(np.int64),
        flops=np.repeat(np.arange(1, exits + 1)[:, None] * 100, rows, axis=1),
        truth=y if labels else None,
    )


def routed(rows=600, *, decides=False, seen=((), (0,), (0, 1)), classes=3, labelled=True, routing=True, seed=0):
    """Three exits and two routing layers; the first layer may decide who is right at exit 1."""
    random = np.random.default_rng(seed)
    level = random.random(rows)
    h = np.stack([level * 0.9, level * 0.2]).astype(np.float32)
    z = random.normal(0, 1.5, (3, rows, classes)).astype(np.float32)
    right = random.random(rows) < 0.7 if not decides else level > 0.5
    y = np.where(right, z[1].argmax(axis=1), z[1].argmin(axis=1))
    return Records(
        logits=z,
        score=np.stack([scores.log_odds(each) for each in z]).astype(np.float32),
        label=z.argmax(axis=2),
        flops=np.repeat([[1], [2], [3]], rows, axis=1),
        routing=h if routing else None,
        routing_seen=seen if routing else None,
        truth=y if labelled else None,
    )


def saved(records, folder, manifest=""):
    """The records as a folder: of the bundle with this manifest's digest, or of none."""
    folder.mkdir()
    exits, rows, classes = records.logits.shape
    index = Index(
        schema=SCHEMA,
        manifest=manifest,
        exits=exits,
        rows=rows,
        classes=classes,
        routing=0 if records.routing is None else len(records.routing),
        routing_seen=None if records.routing_seen is None else [list(layers) for layers in records.routing_seen],
        labelled=records.truth is not None,
    )
    writer = RecordsWriter(folder, index)
    writer.append(records)
    writer.close()
    return folder
