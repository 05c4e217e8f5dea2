"""Every kind of data file gives the same rows, a block at a time, from wherever one starts."""

import json
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from offramp.runtime import InputError, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.jobs.data.raw_rows import Lines, Pictures
from offramp.runtime.jobs.data.sources import open_data
from offramp.runtime.jobs.data.tables import Npy, Npz, Parquet
from offramp.runtime.preprocess import Image, Text, TextPreprocessor

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
        ("d.csv", 'text\n"' + "a" * (1 << 24), "line 2 is not CSV"),
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


def test_json_of_the_sample_is_plain(tmp_path):
    """A .jsonl written by json.dumps, non-ASCII escaped, reads back."""
    texts = ["é", "\U0001f600", "a\nb"]
    table = lines(tmp_path, "d.jsonl", "\n".join(json.dumps({"text": t}) for t in texts))
    assert next(iter(table.blocks({"text": 0}, 0, 9)))["text"] == texts


@pytest.mark.parametrize("length", [131_072, 200_000, 1_000_000])
def test_a_field_of_csv_is_as_long_as_a_text_may_be(tmp_path, length):
    table = lines(tmp_path, "d.csv", f"text,page\na,{'x' * length}\n" + f'"{"y" * length}",\n')
    block = next(iter(table.blocks({"text": 0, "page": 0}, 0, 9)))
    assert [len(text) for text in (*block["text"], *block["page"])] == [1, length, length, 0]


@pytest.fixture(scope="module")
def digits():
    return read_bundle(sample.BUNDLE)


SHARD = np.zeros((2, 8, 8), np.uint8)


def rows_of(data, bundle):
    return {Path(source.name).name: source.rows for source in open_data(data, bundle)}


def test_an_npz_may_have_objects_and_other_things_beside_the_inputs(tmp_path, digits):
    path = tmp_path / "d.npz"
    np.savez(path, x=SHARD, names=np.array([{"a": 1}, None], dtype=object), labels=np.array([1, 2]))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "what nobody asked for")
        archive.writestr("old.npy", b"no array at all")
    (source,) = open_data(path, digits)
    assert source.labels.tolist() == [1, 2]
    (chunk,) = source.chunks(0, 8)
    assert (chunk.parts[0][1]["x"] == SHARD).all()
    assert source.table.digest()


class Raw:
    """Stands for a bundle that takes texts or pictures; what its preprocessing is given is kept."""

    def __init__(self, digits, spec):
        self.manifest = msgspec.structs.replace(digits.manifest, preprocess=spec)
        self.seen = []

    def preprocessor(self):
        return self

    def parts(self, rows, *, first):
        self.seen += rows
        return [(np.arange(len(rows)), {"x": np.zeros((len(rows), 8, 8), np.uint8)})]


class RawTexts(Raw, TextPreprocessor):
    pass


TEXT = Text(tokenizer="t", ids="x", max_length=8)
PICTURE = Image(input="x", height=8, width=8)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("labels", [None, [3, -1, 0, 9], ["3", "", "0", "9"]])
def test_an_npz_may_have_texts(tmp_path, digits, compressed, labels):
    texts = ["what", "", "é \U0001f600", "a longer one"]
    beside = {} if labels is None else {"labels": np.array(labels)}
    (np.savez_compressed if compressed else np.savez)(tmp_path / "d.npz", text=np.array(texts), **beside)
    bundle = RawTexts(digits, TEXT)
    (source,) = open_data(tmp_path / "d.npz", bundle)
    assert sum(chunk.rows for chunk in source.chunks(0, 3)) == source.rows == 4
    assert bundle.seen == texts
    assert {type(text) for text in bundle.seen} == {str}
    assert (source.labels is None) if labels is None else source.labels.tolist() == [3, -1, 0, 9]


def test_so_may_it_have_pictures_by_path_or_decoded(tmp_path, digits):
    for column, values in (("path", np.array(["a.png", "b.png"])), ("image", np.ones((2, 5, 5, 3), np.uint8))):
        np.savez(tmp_path / "d.npz", **{column: values})
        bundle = Raw(digits, PICTURE)
        (source,) = open_data(tmp_path / "d.npz", bundle)
        assert sum(chunk.rows for chunk in source.chunks(0, 1)) == 2
        first = bundle.seen[0]
        assert first == tmp_path / "a.png" if column == "path" else first.shape == (5, 5, 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"text": np.array("alone")}, "column 'text' is a single value, expected one a row"),
        ({"text": np.array(["a", "b"]), "labels": np.array([1])}, "columns have different numbers of rows"),
        ({"text": np.array(["a", None])}, "holds Python objects"),
        ({"words": np.array(["a"])}, "lacks the column 'x'.*or raw rows in a column 'text'"),
    ],
)
def test_texts_of_an_npz_that_are_none_are_named(tmp_path, digits, arrays, message):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(InputError, match=rf"d\.npz: {message}"):
        open_data(tmp_path / "d.npz", RawTexts(digits, TEXT))


@pytest.mark.parametrize("name", ["x", "labels"])
def test_an_npz_with_objects_where_they_are_wanted_is_refused(tmp_path, digits, name):
    objects = np.array([{"a": 1}, None], dtype=object)
    np.savez(tmp_path / "d.npz", **({"x": SHARD} | {name: objects}))
    with pytest.raises(InputError, match=r"d\.npz: holds Python objects"):
        open_data(tmp_path / "d.npz", digits)


def test_shards_are_found_whatever_the_case_of_their_names_and_hidden_files_are_none(tmp_path, digits):
    for name in ("V.NPZ", "a.npz", "b.Npz"):
        with (tmp_path / name).open("wb") as stream:
            np.savez(stream, x=SHARD)
    for name in ("._a.npz", ".V.NPZ", "._x.npy"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7 what macOS writes")
    with (tmp_path / "C.NPY").open("wb") as stream:
        np.save(stream, SHARD)
    assert rows_of(tmp_path, digits) == dict.fromkeys(("C.NPY", "V.NPZ", "a.npz", "b.Npz"), 2)
    assert rows_of(tmp_path / "V.NPZ", digits) == {"V.NPZ": 2}


@pytest.mark.parametrize(
    ("name", "text"), [("D.TXT", "a\nb"), ("D.CSV", "text\na\nb"), ("D.JSONL", '{"text": "a"}\n' * 2)]
)
def test_lines_are_read_by_their_kind_whatever_its_case(tmp_path, name, text):
    assert lines(tmp_path, name, text).rows("text") == 2


def test_a_linked_shard_is_one_and_a_link_that_leads_nowhere_is_named(tmp_path, digits):
    np.savez(tmp_path / "elsewhere.npz", x=SHARD)
    data = tmp_path / "data"
    data.mkdir()
    (data / "1.npz").symlink_to("../elsewhere.npz")
    (data / "README").symlink_to("nowhere")
    assert rows_of(data, digits) == {"1.npz": 2}
    (data / "2.npz").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"2\.npz is a link that leads nowhere"):
        open_data(data, digits)


def pictures(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


def labels_of(folder):
    table = Pictures(folder)
    return next(iter(table.blocks({"path": 0, "labels": 0}, 0, 99)))["labels"] if "labels" in table.names else None


def test_a_linked_folder_is_a_class_and_a_hidden_one_is_none(tmp_path):
    pictures(tmp_path, "data/dog/1.png", "elsewhere/2.png", "elsewhere/3.jpg", "data/.thumbnails/1.png")
    pictures(tmp_path, "data/dog/.cache/1.png", "data/dog/._1.png")
    (tmp_path / "data" / "cat").symlink_to("../elsewhere")
    (tmp_path / "data" / "dog" / "4.png").symlink_to("../../elsewhere/2.png")
    assert labels_of(tmp_path / "data") == ["cat", "cat", "dog", "dog"]
    before = Pictures(tmp_path / "data").digest()
    pictures(tmp_path, "elsewhere/0.png")
    assert Pictures(tmp_path / "data").digest() != before
    (tmp_path / "linked").symlink_to("data")
    assert labels_of(tmp_path / "linked") == ["cat", "cat", "cat", "dog", "dog"]


def test_one_folder_may_be_linked_twice_and_a_link_back_ends(tmp_path):
    pictures(tmp_path, "data/a/1.png")
    (tmp_path / "data" / "b").symlink_to("a")
    (tmp_path / "data" / "a" / "up").symlink_to("..")
    (tmp_path / "data" / "again").symlink_to(".")
    assert labels_of(tmp_path / "data") == ["a", "b"]


@pytest.mark.parametrize("name", ["cat", "dog/2.png", "dog/2.JPG"])
def test_a_linked_class_or_picture_that_is_gone_is_named(tmp_path, name):
    pictures(tmp_path, "dog/1.png")
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(InputError, match=f"{Path(name).name} is a link that leads nowhere"):
        Pictures(tmp_path)


def test_pictures_deeper_than_a_class_are_refused(tmp_path):
    pictures(tmp_path, "a/1.png", "b/c/d/e/2.png")
    with pytest.raises(InputError, match="not both or deeper ones"):
        Pictures(tmp_path)
