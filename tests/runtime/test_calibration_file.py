"""calibration.json gives back what was written, infinities included, and damage is an error that names the place."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import BundleError, InputError, OperatingPoint, calibration, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import (
    Calibration,
    decode_calibration,
    encode_calibration,
    read_calibration,
    write_calibration,
)
from offramp.runtime.files import seal
from offramp.runtime.points import FULL, full

WHERE = Path("b/calibration.json")
NUMBERS = st.floats(allow_nan=False)
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name != FULL)


@st.composite
def points(draw):
    exits = draw(st.integers(1, 4))
    found = {FULL: full(exits)}
    for name in draw(st.lists(NAMES, max_size=3, unique=True)):
        bars = draw(st.lists(NUMBERS, min_size=exits - 1, max_size=exits - 1))
        calibrators = draw(st.sampled_from([(), tuple(calibration.get("identity") for _ in range(exits))]))
        found[name] = OperatingPoint(
            (*bars, -math.inf), draw(NUMBERS), name, calibrators, {"accuracy": 0.5}, {"seed": draw(st.integers(0, 9))}
        )
    return found


def encoded(found, **fields):
    given = {"version": 3, "created": "then", "provenance": {"rows": 10}, **fields}
    return encode_calibration(Calibration(found, **given), "ab" * 32, created="then", producer="a test")


@given(points())
@settings(max_examples=100, deadline=None)
def test_what_is_read_is_what_was_written(found):
    back = decode_calibration(encoded(found), WHERE)
    assert list(back.points) == list(found)
    for name, point in found.items():
        same = back.points[name]
        assert (same.thresholds, same.abstain_below) == (point.thresholds, point.abstain_below), "to the last bit"
        assert [c.to_dict() for c in same.calibrators] == [c.to_dict() for c in point.calibrators]
        assert (same.name, same.expected, same.provenance) == (name, point.expected, point.provenance)
    assert (back.version, back.created, back.provenance) == (3, "then", {"rows": 10})
    assert back.manifest == "ab" * 32


def test_infinities_are_words_for_json_has_none():
    document = json.loads(encoded({FULL: full(2)}))["operating_points"][FULL]
    assert document["thresholds"] == ["inf", "-inf"]
    assert document["abstain_below"] == "-inf"


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_is_a_bundle_error_that_names_the_file(data):
    whole = encoded({FULL: full(2), "half": OperatingPoint((1.0, -math.inf), 0.25, "half")})
    at = data.draw(st.integers(1, len(whole) - 1))
    damaged = data.draw(
        st.sampled_from([whole[:at], whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :], whole[:at] + whole])
    )
    with pytest.raises(BundleError, match=r"^b/calibration\.json: "):
        decode_calibration(damaged, WHERE)


def changed(**fields):
    """A calibration whose fields of the point "half" were changed by hand, and sealed again."""
    document = json.loads(encoded({FULL: full(2), "half": OperatingPoint((1.0, -math.inf), 0.25, "half")}))
    document.pop("digest")
    document["operating_points"]["half"].update(fields)
    return document


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thresholds": [1.0, 2.0]}, r"operating_points\['half'\]: .*the last threshold is 2.0"),
        ({"thresholds": ["high", "-inf"]}, r"operating_points\['half'\]: 'high' is not a number, \"inf\" or \"-inf\""),
        ({"thresholds": ["nan", "-inf"]}, r"operating_points\['half'\]: 'nan' is not a number"),
        ({"thresholds": None}, r"thresholds"),
        ({"thresholds": [[1.0], "-inf"]}, r"got `array` - at `\$\.operating_points.*thresholds\[0\]"),
        ({"abstain_below": "never"}, r"operating_points\['half'\]: 'never' is not a number"),
        ({"abstain_below": {}}, r"abstain_below"),
        ({"calibrators": [{"name": "warp"}] * 2}, r"operating_points\['half'\]: .*warp"),
        ({"calibrators": [{}] * 2}, r"operating_points\['half'\]: "),
        ({"calibrators": [{"name": "temperature", "version": 2}] * 2}, r"operating_points\['half'\]: .*version 1"),
        ({"calibrators": [{"name": "identity", "version": 1, "options": 3}] * 2}, r"operating_points\['half'\]: "),
    ],
)
def test_a_field_that_makes_no_sense_is_named(fields, message):
    with pytest.raises(BundleError, match=rf"^b/calibration\.json: .*{message}"):
        decode_calibration(seal(changed(**fields)), WHERE)


@pytest.mark.parametrize(
    "fitted", [3, [], {}, {"classes": 3}, {"classes": 3, "temperature": "warm"}, {"classes": 3, "temperature": None}]
)
def test_a_calibrator_without_what_it_was_fitted_to_is_refused(fitted):
    calibrators = [{"name": "temperature", "version": 1, "fitted": fitted}] * 2
    with pytest.raises(BundleError, match=r"operating_points\['half'\]: "):
        decode_calibration(seal(changed(calibrators=calibrators)), WHERE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": "entropy"}, "score is 'entropy', this offramp gates on 'logodds'"),
        ({"operating_points": {}}, "operating_points lacks 'full'"),
        ({"schema": "offramp-calibration/9"}, "schema is 'offramp-calibration/9', this offramp reads"),
        ({"version": "three"}, r"version"),
    ],
)
def test_a_document_that_is_another_kind_is_named(fields, message):
    with pytest.raises(BundleError, match=rf"^b/calibration\.json: .*{message}"):
        decode_calibration(seal({**changed(), **fields}), WHERE)


@pytest.fixture
def manifest():
    return read_bundle(sample.BUNDLE).manifest


def test_a_folder_without_one_has_only_full(tmp_path, manifest):
    found = read_calibration(tmp_path, manifest)
    assert list(found.points.values()) == [full(len(manifest.exits))]
    assert found.version == 0
    with pytest.raises(InputError, match=r"operating_point is 'fast', this bundle has \['full'\]"):
        found.point("fast")


def test_written_for_a_manifest_it_is_read_with_that_one_alone(tmp_path, manifest):
    exits = len(manifest.exits)
    write_calibration(tmp_path, manifest, Calibration({FULL: full(exits)}, 7), created="now", producer="a test")
    assert read_calibration(tmp_path, manifest).version == 7
    (tmp_path / "calibration.json").write_bytes(encoded({FULL: full(exits)}))
    with pytest.raises(BundleError, match="belongs to another bundle"):
        read_calibration(tmp_path, manifest)
    (tmp_path / "calibration.json").write_bytes(
        encode_calibration(Calibration({FULL: full(exits + 1)}), manifest.digest, created="", producer="")
    )
    with pytest.raises(BundleError, match=rf"operating_points\['full'\]: {exits + 1} thresholds for {exits} exits"):
        read_calibration(tmp_path, manifest)


def fitted(temperature):
    document = {"classes": 2, "has_optimum": True, "temperature": temperature}
    return calibration.from_dict({"name": "temperature", "version": 1, "options": {}, "fitted": document})


BOTH = Calibration(
    {
        FULL: full(3),
        "fast": OperatingPoint((1.0, 2.0, -math.inf), 0.5, "fast", tuple(map(fitted, (1.5, 2.5, 3.5)))),
        "slow": OperatingPoint((4.0, 2.0, -math.inf), 0.5, "slow", tuple(map(fitted, (1.5, 2.7, 3.7)))),
        "first": OperatingPoint((1.0, math.inf, -math.inf), 0.5, "first", tuple(map(fitted, (1.5, 9.0, 3.9)))),
    }
)


@pytest.mark.parametrize(
    ("name", "exit", "temperature"),
    [
        (FULL, 0, 1.5),
        (FULL, 1, 2.7),  # by the point that lets the fewest leave before
        (FULL, 2, None),
        ("fast", 1, 2.5),  # by its own wherever it has one
        ("fast", 2, 3.5),
        ("first", 0, 1.5),
        ("first", 1, 2.7),  # not by the one of an exit that is switched off
    ],
)
def test_a_shortened_point_is_calibrated_where_any_point_knows_the_exit(name, exit, temperature):
    point = BOTH.point(name)
    short = BOTH.stopping_at(point, exit)
    assert short.thresholds == point.stopping_at(exit).thresholds
    assert short.abstain_below == point.abstain_below
    expected = calibration.get("identity") if temperature is None else fitted(temperature)
    assert short.calibrator(exit) == expected


@pytest.mark.parametrize("exit", [0, 1, 2])
def test_it_is_left_as_it_is_where_nothing_is_known_or_it_is_the_users_own(exit):
    alone = Calibration({FULL: full(3)})
    assert alone.stopping_at(full(3), exit) == full(3).stopping_at(exit)
    mine = OperatingPoint((math.inf, math.inf, -math.inf), 1.0, "mine")
    assert BOTH.stopping_at(mine, exit) == mine.stopping_at(exit)
