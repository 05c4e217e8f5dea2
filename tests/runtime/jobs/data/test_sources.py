"""Every kind of data file gives the same rows, a block at a time, from wherever one starts."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import InputError
from offramp.runtime.jobs.data.raw_rows import Lines, Pictures
from offramp.runtime.jobs.data.sources import class_numbers
from offramp.runtime.jobs.data.tables import Npy, Npz, Parquet

ROWS, STEP = 50, 8
X = np.random.default_rng(0).standard_normal((ROWS, 3, 4)).astype(np.float32)
LABELS = np.arange(ROWS)


def npz(path, *, compressed=False, order="C", axis=0):
    arrays = {"x": np.asarray(np.moveaxis(X, 0, axis), order=order), "labels": LABELS}
    (np.savez_compressed if compressed else np.savez)(path / "d.npz", **arrays)
    return Npz(path / "d.npz")


def parquet(path, **options):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(arrow.table({"x": X.tolist(), "labels": LABELS}), path / "d.parquet", **options)
    return Parquet(path / "d.parquet")


def fixed_size_parquet(path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    inner = arrow.FixedSizeListArray.from_arrays(arrow.array(X.reshape(-1)), 4)
    table = arrow.table({"x": arrow.FixedSizeListArray.from_arrays(inner, 3), "labels": LABELS})
    files.write_table(table, path / "d.parquet", row_group_size=5)
    return Parquet(path / "d.parquet")


TABLES = {
    "stored": npz,
    "compressed": lambda path: npz(path, compressed=True),
    "fortran": lambda path: npz(path, order="F"),
    "fortran compressed": lambda path: npz(path, compressed=True, order="F"),
    "parquet": parquet,
    "row groups": lambda path: parquet(path, row_group_size=7),
    "fixed size": fixed_size_parquet,
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("start", [0, STEP, 3 * STEP, 6 * STEP, 7 * STEP])
def test_blocks_are_the_rows_from_where_one_starts(tmp_path, kind, start):
    table = TABLES[kind](tmp_path)
    assert table.rows("x") == table.rows("labels") == ROWS
    blocks = list(table.blocks({"x": 0, "labels": 0}, start, STEP))
    assert [len(b["x"]) for b in blocks] == [len(range(k, min(k + STEP, ROWS))) for k in range(start, ROWS, STEP)]
    if blocks:
        np.testing.assert_allclose(np.concatenate([b["x"] for b in blocks]), X[start:], rtol=1e-6)
        assert (np.concatenate([b["labels"] for b in blocks]) == LABELS[start:]).all()


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_may_lie_along_another_axis(tmp_path, compressed):
    table = npz(tmp_path, compressed=compressed, axis=1)
    assert table.rows("x", 1) == ROWS
    blocks = list(table.blocks({"x": 1}, STEP, STEP))
    assert (np.concatenate([b["x"] for b in blocks], axis=1) == np.moveaxis(X, 0, 1)[:, STEP:]).all()


def test_an_npy_is_one_column(tmp_path):
    np.save(tmp_path / "d.npy", X)
    blocks = list(Npy(tmp_path / "d.npy", "x").blocks({"x": 0}, 0, STEP))
    assert (np.concatenate([b["x"] for b in blocks]) == X).all()


def test_uncompressed_arrays_are_mapped_not_read(tmp_path):
    block = next(iter(npz(tmp_path).blocks({"x": 0}, 0, STEP)))
    base = block["x"]
    while getattr(base, "base", None) is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


@pytest.mark.parametrize("compressed", [False, True])
def test_damage_inside_an_archive_is_noticed(tmp_path, compressed):
    npz(tmp_path, compressed=compressed)
    path = tmp_path / "d.npz"
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("x.npy").header_offset + 400
    data[at] ^= 0xFF
    path.write_bytes(data)

    def read():
        table = Npz(path)
        table.digest()
        list(table.blocks({"x": 0}, 0, STEP))

    with pytest.raises(InputError, match=r"d\.npz: can't be read"):
        read()


@pytest.mark.parametrize("size", [10, 200, 500])
def test_a_file_cut_short_is_named(tmp_path, size):
    npz(tmp_path)
    np.save(tmp_path / "d.npy", X)
    parquet(tmp_path)
    for name in ("d.npz", "d.npy", "d.parquet"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(InputError, match=name):
            {"d.npz": Npz, "d.npy": lambda p: Npy(p, "x"), "d.parquet": Parquet}[name](path)


def test_ragged_rows_and_gaps_in_parquet_are_named(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    for k, column in enumerate([[[1, 2], [3]], [[1, 2], None], [[[1], [2]], [[1, 2], [3]]], [1.0, None]]):
        files.write_table(arrow.table({"x": column}), tmp_path / f"{k}.parquet")
        with pytest.raises(InputError, match="column 'x' is ragged or has gaps"):
            list(Parquet(tmp_path / f"{k}.parquet").blocks({"x": 0}, 0, STEP))
    files.write_table(arrow.table({"x": [[1, 2], [1, 2, 3]]}), tmp_path / "w.parquet", row_group_size=1)
    with pytest.raises(InputError, match="column 'x' is ragged or has gaps"):
        list(Parquet(tmp_path / "w.parquet").blocks({"x": 0}, 0, 1))


def test_parquet_kinds(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    columns = {
        "text": ["a", None],
        "coded": arrow.array(["u", "v"]).dictionary_encode(),
        "labels": arrow.array([3, None], arrow.int8()),
        "flag": [True, False],
        "image": [{"bytes": b"x", "path": None}, {"bytes": None, "path": "p"}],
    }
    files.write_table(arrow.table(columns), tmp_path / "d.parquet")
    block = next(iter(Parquet(tmp_path / "d.parquet").blocks(dict.fromkeys(columns, 0), 0, 9)))
    assert block["text"] == ["a", None]
    assert block["coded"] == ["u", "v"]
    assert block["labels"].tolist() == [3, -1]
    assert block["flag"].tolist() == [True, False]
    assert block["image"][0]["bytes"] == b"x"


def lines(tmp_path: Path, name: str, text: str | bytes) -> Lines:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return Lines(tmp_path / name)


def test_text_files_have_a_row_a_line(tmp_path):
    table = lines(tmp_path, "d.txt", "\ufeffone\r\n\n x \u2028 y\nlast")
    assert table.rows("text") == 4
    assert next(iter(table.blocks({"text": 0}, 0, 9)))["text"] == ["one", "", " x \u2028 y", "last"]
    assert [b["text"] for b in table.blocks({"text": 0}, 2, 1)] == [[" x \u2028 y"], ["last"]]
    assert lines(tmp_path, "e.txt", "").rows("text") == 0


def test_csv_and_jsonl_have_named_columns(tmp_path):
    table = lines(tmp_path, "d.csv", 'text,labels\n"a, ""b""\nc",yes\n\né,\n')
    assert next(iter(table.blocks({"text": 0, "labels": 0}, 0, 9))) == {
        "text": ['a, "b"\nc', "é"],
        "labels": ["yes", ""],
    }
    table = lines(tmp_path, "d.jsonl", '{"text": "a"}\n\n{"labels": null, "text": "b"}\n{"text": "c", "labels": 1}')
    assert next(iter(table.blocks({"text": 0, "labels": 0}, 0, 9))) == {
        "text": ["a", "b", "c"],
        "labels": [None, None, 1],
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.txt", b"\xff\xfe", r"d\.txt: can't be read"),
        ("d.csv", "text,labels\na\n", "line 2 has 1 fields, the first one 2"),
        ("d.csv", "text,text\na,b\n", "names a column twice"),
        ("d.csv", 'text\n"a\n', "line 2 is not CSV"),
        ("d.jsonl", '{"text": "a"}\n{"text": \n', "line 2 is not a JSON object"),
        ("d.jsonl", '["a"]\n', "line 1 is not a JSON object"),
        ("d.jsonl", '{"text": "\\ud83d"}\n', "line 1 is not a JSON object"),
    ],
)
def test_broken_lines_are_refused_by_number(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message):
        lines(tmp_path, name, text)


def test_a_folder_a_class(tmp_path):
    for name in ("cat/b.PNG", "cat/a.jpg", "dog/c.jpeg", "dog/notes.txt", "dog/.hidden.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    table = Pictures(tmp_path)
    block = next(iter(table.blocks({"path": 0, "labels": 0}, 0, 9)))
    assert [p.name for p in block["path"]] == ["a.jpg", "b.PNG", "c.jpeg"]
    assert block["labels"] == ["cat", "cat", "dog"]
    before = table.digest()
    (tmp_path / "cat" / "a.jpg").write_bytes(b"other")
    assert Pictures(tmp_path).digest() != before
    (tmp_path / "loose.png").write_bytes(b"")
    with pytest.raises(InputError, match="one folder of pictures a class, not both"):
        Pictures(tmp_path)


@pytest.mark.parametrize(
    ("values", "classes", "expected"),
    [
        (["yes", "no", "", None, -1, 1, "0"], ["no", "yes"], [1, 0, -1, -1, -1, 1, 0]),
        (["1", "2"], ["2", "1"], [1, 0]),
        (np.array(["no", "yes"]), ["no", "yes"], [0, 1]),
        (np.array([1.0, -1.0]), ["no", "yes"], [1, -1]),
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
    ],
)
def test_other_labels_are_refused_by_row(values, classes, message):
    with pytest.raises(InputError, match=message):
        class_numbers(values, classes, "d: labels", 10)


def test_json_of_the_sample_is_plain(tmp_path):
    """A .jsonl written by json.dumps, non-ASCII escaped, reads back."""
    texts = ["é", "\U0001f600", "a\nb"]
    table = lines(tmp_path, "d.jsonl", "\n".join(json.dumps({"text": t}) for t in texts))
    assert next(iter(table.blocks({"text": 0}, 0, 9)))["text"] == texts
