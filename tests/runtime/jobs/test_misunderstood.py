"""What is easily handed in by mistake: a path for what it leads to, one thing for a list of it."""

import pytest
from made_records import made_up
from offramp.runtime import InputError, sample
from offramp.runtime.jobs import calibrate, inspect, record
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Budget


def test_a_path_where_a_cascade_or_a_bundle_is_meant_says_how_to_open_it(tmp_path):
    for path in (sample.BUNDLE, str(sample.BUNDLE)):
        with pytest.raises(InputError, match=r"cascade is .*Cascade\.load\("):
            record(path, tmp_path / "d.npz", tmp_path / "r")
        with pytest.raises(InputError, match=r"bundle is .*read_bundle\(path\)"):
            inspect(path, {})


@pytest.mark.parametrize(
    "options",
    [
        {"targets": Budget(0.5)},
        {"targets": "half"},
        {"targets": [0.5]},
        {"abstain": AbstainRisk(0.05)},
        {"abstain": 0.05},
        {"abstain": [0.05]},
    ],
)
def test_one_target_where_a_list_is_meant_is_named(tmp_path, options):
    (name,) = options
    with pytest.raises(InputError, match=rf"{name} is .*, expected a list such as \["):
        calibrate(None, made_up(rows=60, exits=2), out=tmp_path / "o", **options)
    assert not (tmp_path / "o").exists()
