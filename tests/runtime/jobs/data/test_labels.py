"""Labels are class numbers or names, however a table's writer spells them, and nothing else is read as one."""

import json
import math
import unicodedata

import numpy as np
import pytest
from offramp.runtime import InputError
from offramp.runtime.arrays.class_numbers import class_numbers
from offramp.runtime.jobs.data.raw_rows import Lines, Pictures
from offramp.runtime.jobs.data.tables import Npz, Parquet

DIGITS = [f"digit {k}" for k in range(11)]
COMPOSED, APART = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize(
    ("values", "classes", "expected"),
    [
        (["yes", "no", "", None, -1, 1, "0"], ["no", "yes"], [1, 0, -1, -1, -1, 1, 0]),
        (["1", "2"], ["2", "1"], [1, 0]),
        (np.array(["no", "yes"]), ["no", "yes"], [0, 1]),
        (np.array([1.0, -1.0]), ["no", "yes"], [1, -1]),
        (["3.0", "", "7.0"], DIGITS, [3, -1, 7]),
        ([3.0, None, 7.0], DIGITS, [3, -1, 7]),
        ([3.0, math.nan, -1.0], DIGITS, [3, -1, -1]),
        (np.array([3.0, math.nan, 7.0], np.float16), DIGITS, [3, -1, 7]),
        (np.array(["3.0", "", "7."]), DIGITS, [3, -1, 7]),
        ([" 3", "+3", "03", "3.00"], DIGITS, [3, 3, 3, 3]),
        (["2.0", "1"], ["2", "1"], [0, 1]),
        (["1_0", "1.0"], ["1_0", "1.0", "x"], [0, 1]),
        (np.array([3, 7], np.uint8), DIGITS, [3, 7]),
        ([COMPOSED, APART], ["th\u00e9", COMPOSED], [1, 1]),
        ([COMPOSED, APART], ["th\u00e9", APART], [1, 1]),
        ([COMPOSED, APART], [APART, COMPOSED], [1, 0]),
        (np.array([COMPOSED, APART, ""]), [APART], [0, 0, -1]),
    ],
)
def test_labels_are_numbers_or_names(values, classes, expected):
    assert class_numbers(values, classes, "d: labels", 0).tolist() == expected


@pytest.mark.parametrize(
    ("values", "classes", "message"),
    [
        (["no", "maybe"], ["no", "yes"], r"labels\[11\] is 'maybe', which is none of the 2 classes"),
        (["2", "0"], ["2", "1"], r"labels\[11\] is '0'"),
        ([True], ["no", "yes"], r"labels\[10\] is True"),
        ([0, 2], ["no", "yes"], r"labels\[11\] is 2, expected 0…1"),
        (["3", "1_0"], DIGITS, r"labels\[11\] is '1_0'"),
        (["\u0663"], DIGITS, r"labels\[10\] is '\u0663'"),
        (["3.5"], DIGITS, r"labels\[10\] is '3\.5'"),
        (["1e0"], DIGITS, r"labels\[10\] is '1e0'"),
        (["nan"], DIGITS, r"labels\[10\] is 'nan'"),
        ([3.5], DIGITS, r"labels\[10\] is 3\.5"),
        ([math.inf], DIGITS, r"labels\[10\] is inf"),
        ([10**30], DIGITS, rf"labels\[10\] is {10**30}, expected 0…10"),
        (["-2"], DIGITS, r"labels\[10\] is -2, expected 0…10"),
        (["9" * 30], DIGITS, r"labels\[10\] is '9+'"),
        (np.array([3, 2**64 - 1], np.uint64), DIGITS, rf"labels\[11\] is {2**64 - 1}"),
        (np.array([1e30]), DIGITS, r"labels\[10\] is 1e\+30"),
        (np.array([3.5, math.nan]), DIGITS, "has the dtype float64"),
    ],
)
def test_other_labels_are_refused_by_row(values, classes, message):
    with pytest.raises(InputError, match=message):
        class_numbers(values, classes, "d: labels", 10)


def labels_of(table, classes):
    (block,) = table.blocks({"labels": 0}, 0, 99)
    return class_numbers(block["labels"], classes, "d: labels", 0).tolist()


WRITTEN = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "parquet": lambda frame, path: frame.to_parquet(path),
    "npz": lambda frame, path: np.savez(path, x=np.zeros(len(frame)), labels=frame["labels"].to_numpy()),
}
READ = {"csv": Lines, "jsonl": Lines, "parquet": Parquet, "npz": Npz}


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("labels", [[3, None, 7], [None, 3, 0], [3.0, 7.0, 10.0]])
def test_a_column_with_gaps_is_read_as_pandas_writes_it(tmp_path, kind, labels):
    pandas = pytest.importorskip("pandas")
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"d.{kind}"
    WRITTEN[kind](pandas.DataFrame({"text": ["a", "b", "c"], "labels": labels}), path)
    assert labels_of(READ[kind](path), DIGITS) == [-1 if k is None else int(k) for k in labels]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("d.csv", "text,labels\na,3.0\nb,\nc,7.0\n"),
        ("d.jsonl", '{"labels": 3.0}\n{"labels": null}\n{"labels": 7.0}\n'),
        ("d.jsonl", '{"labels": 3}\n{"text": "b"}\n{"labels": "7.0"}\n'),
    ],
)
def test_gaps_in_lines_need_no_pandas(tmp_path, name, data):
    (tmp_path / name).write_text(data)
    assert labels_of(Lines(tmp_path / name), DIGITS) == [3, -1, 7]


@pytest.mark.parametrize("column", [[3.0, None, 7.0], [3.0, math.nan, 7.0], [3, None, 7], ["3.0", None, "7"]])
def test_gaps_in_parquet_need_no_pandas(tmp_path, column):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"labels": column}), tmp_path / "d.parquet")
    assert labels_of(Parquet(tmp_path / "d.parquet"), DIGITS) == [3, -1, 7]


@pytest.mark.parametrize("spelled", ["NFC", "NFD"])
@pytest.mark.parametrize("classes", ["NFC", "NFD"])
def test_accents_may_be_apart_in_files_and_folders(tmp_path, spelled, classes):
    names = ["thé", "café", "한국어"]
    written = [unicodedata.normalize(spelled, name) for name in names]
    known = [unicodedata.normalize(classes, name) for name in names]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"labels": name}) + "\n" for name in written))
    assert labels_of(Lines(tmp_path / "d.jsonl"), known) == [0, 1, 2]
    for name in written:
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "1.png").write_bytes(b"")
    assert sorted(labels_of(Pictures(tmp_path / "pictures"), known)) == [0, 1, 2]
