"""What isn't a number in JSON is null, wherever it stands."""

import json
from dataclasses import dataclass

import numpy as np
from offramp.runtime.jobs.plain_json import number, plain, to_json


@dataclass(frozen=True)
class Found:
    value: float
    table: tuple[dict[str, object], ...]


def test_undefined_figures_become_null_at_any_depth():
    found = Found(np.float32("nan"), ({"low": -np.inf, 3: np.int64(4)}, {"array": np.array([[0.5, np.nan]])}))
    want = {"value": None, "table": [{"low": None, "3": 4}, {"array": [[0.5, None]]}]}
    assert plain(found) == want
    assert json.loads(to_json({"found": found, "name": "ünï"})) == {"found": want, "name": "ünï"}
    assert (number(np.float64(2)), number(np.inf)) == (2.0, None)
