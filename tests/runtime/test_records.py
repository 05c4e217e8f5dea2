"""Records on disk: the bytes don't depend on how they came, and a damaged folder is an error that names the file."""

import json
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import made_up
from offramp.runtime import InputError
from offramp.runtime.jobs.data.opened import own_logits
from offramp.runtime.predictions import Records
from offramp.runtime.records import SCHEMA, Index, RecordsWriter, read_index, read_records

ROWS, EXITS, CLASSES, LAYERS = 23, 3, 4, 5


def everything(rows=ROWS):
    """Records with all that there can be, widths that differ from exit to exit, and values that are no number."""
    rng = np.random.default_rng(1)
    made = made_up(rows=rows, exits=EXITS, classes=CLASSES)
    made.score[1, :1] = np.nan
    made.logits[2, :1, 0] = -np.inf
    return replace(
        made,
        features=tuple(rng.standard_normal((rows, *shape)).astype(np.float32) for shape in ((6,), (2, 3), (1,))),
        routing=rng.random((LAYERS, rows)).astype(np.float32),
        external=rng.random((EXITS, rows)).astype(np.float32),
        reservation=rng.random((EXITS, rows)).astype(np.float32),
    )


def index(rows=ROWS, **more):
    shapes = {"features": [[6], [2, 3], [1]], "routing": LAYERS, "external": True, "reservation": True}
    given = {**shapes, "labelled": True, **more}
    return Index(schema=SCHEMA, manifest="", exits=EXITS, rows=rows, classes=CLASSES, **given)


def part(records, rows):
    """Some rows of everything in them."""

    def some(name, value):
        if value is None or isinstance(value, tuple):
            return value and tuple(one[rows] for one in value)
        return value[rows] if value.ndim == 1 else value[:, rows]

    return Records(**{f.name: some(f.name, getattr(records, f.name)) for f in fields(Records)})


def write(folder, records, ends=()):
    folder.mkdir(exist_ok=True)
    writer = RecordsWriter(folder, index(len(records)))
    for start, end in zip([0, *ends], [*ends, len(records)], strict=True):
        writer.append(part(records, slice(start, end)))
        assert writer.at == end
    writer.close()
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(one, two):
    for field in fields(Records):
        a, b = getattr(one, field.name), getattr(two, field.name)
        assert (a is None) == (b is None), field.name
        for x, y in zip(() if a is None else a, () if b is None else b, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=field.name)


@pytest.fixture(scope="module")
def records():
    return everything()


@pytest.fixture(scope="module")
def whole(records, tmp_path_factory):
    return write(tmp_path_factory.mktemp("whole") / "r", records)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "r")


def test_what_is_read_is_what_was_written(records, whole):
    found = read_records(whole)
    same(found, records)
    assert len(found) == ROWS
    assert all(isinstance(z, np.memmap) for z in (*found.logits, *found.features)), "they stay on the disk"


@given(st.lists(st.integers(0, ROWS), max_size=5).map(sorted))
@settings(max_examples=30, deadline=None)
def test_the_bytes_do_not_depend_on_the_parts(records, whole, tmp_path_factory, ends):
    assert contents(write(tmp_path_factory.mktemp("parts") / "r", records, ends)) == contents(whole)


@pytest.mark.parametrize("cut", [1, 10, ROWS])
def test_a_writer_goes_on_where_another_was_cut_short(records, whole, tmp_path, cut):
    first = RecordsWriter(tmp_path, index())
    first.append(part(records, slice(0, cut)))
    first.sync()
    first.append(part(records, slice(cut, cut + 3)))  # perhaps on the disk, perhaps not: it is written again
    first.stop()
    second = RecordsWriter(tmp_path, index(), at=cut)
    second.append(part(records, slice(cut, ROWS)))
    second.close()
    assert contents(tmp_path) == contents(whole)


def test_a_writer_does_not_go_on_in_a_file_that_is_another(records, tmp_path):
    first = RecordsWriter(tmp_path, index())
    first.append(part(records, slice(0, 5)))
    first.stop()
    (tmp_path / "score_1.npy").write_bytes(b"short")
    second = RecordsWriter(tmp_path, index(), at=5)
    with pytest.raises(InputError, match=r"score_1\.npy: not the file that was begun"):
        second.append(part(records, slice(5, ROWS)))
    second.stop()


def test_more_rows_than_announced_and_fewer_are_refused(records, tmp_path):
    writer = RecordsWriter(tmp_path, index(rows=10))
    with pytest.raises(InputError, match="23 rows come, 10 were announced"):
        writer.append(records)
    writer.append(part(records, slice(0, 4)))
    with pytest.raises(InputError, match="4 rows were written, 10 were announced"):
        writer.close()
    writer.stop()
    assert not (tmp_path / "records.json").exists(), "without an index it is no records"


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_a_part_of_another_shape_or_type_is_refused_by_its_file(records, tmp_path, what):
    writer = RecordsWriter(tmp_path, index())
    writer.append(part(records, slice(0, 4)))
    more = part(records, slice(4, 8))
    logits = more.logits[:, :, :3] if what == "shape" else more.logits.astype(np.float64)
    with pytest.raises(InputError, match=r"logits_0\.npy: rows of .* expected the same shape from every file"):
        writer.append(replace(more, logits=logits))
    writer.stop()


def test_no_rows_are_records_too(tmp_path):
    nobody = everything(0)
    found = read_records(write(tmp_path / "r", nobody))
    same(found, nobody)
    assert len(found) == 0


# ---------------------------------------------------------------- what can't be read

FILES = ["logits_0", "score_1", "label_2", "flops_0", "features_1", "routing", "external_2", "reservation_0", "labels"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut short", "empty", "text", "fewer rows", "another type", "pickled"])
def test_a_damaged_file_is_named(folder, name, damage):
    path = folder / f"{name}.npy"
    array = np.load(path)
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:-2])
    elif damage in ("empty", "text"):
        path.write_bytes(b"" if damage == "empty" else b"not numpy at all")
    elif damage == "fewer rows":
        np.save(path, array[..., :-1])
    elif damage == "another type":
        np.save(path, np.full(array.shape, "x"))
    else:
        np.save(path, np.full(array.shape, None, object), allow_pickle=True)
    with pytest.raises(InputError, match=rf"{name}\.npy: .*Record again"):
        read_records(folder)


def change(folder, **more):
    document = json.loads((folder / "records.json").read_text())
    (folder / "records.json").write_text(json.dumps({**document, **more}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"schema": "offramp-records/9"}, r"records\.json: schema is 'offramp-records/9', this offramp reads"),
        ({"rows": "many"}, r"records\.json: .*rows"),
        ({"exits": None}, r"records\.json: .*exits"),
        ({"rows": ROWS + 1}, r"logits_0\.npy: .*records\.json says \(24, 4\)"),
        ({"rows": -1}, r"records\.json: rows is -1, expected at least 0"),
        ({"classes": 5}, r"logits_0\.npy: .*records\.json says \(23, 5\)"),
        ({"exits": 4}, r"records\.json: features has 3 shapes for 4 exits"),
        ({"routing": 4}, r"routing\.npy: .*records\.json says \(4, 23\)"),
    ],
)
def test_an_index_that_is_not_the_folders_is_said_so(folder, more, message):
    change(folder, **more)
    with pytest.raises(InputError, match=message):
        read_records(folder)


@pytest.mark.parametrize("more", [{"exits": 0}, {"exits": -2}, {"features": [[6]]}])
def test_an_index_that_makes_no_sense_by_itself_is_said_so(folder, more):
    change(folder, **more)
    with pytest.raises(InputError, match=r"records\.json"):
        read_records(folder)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe"])
def test_an_index_that_is_none_is_named(folder, damage):
    (folder / "records.json").write_bytes(damage)
    with pytest.raises(InputError, match=r"records\.json: "):
        read_index(folder)


def test_a_folder_without_records_says_who_writes_them(tmp_path):
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"records\.json: can't be read .* written by `offramp record`"):
            read_records(where)


BROKEN = {
    "empty": b"",
    "text": b"x,y",
    "zip": b"PK\x03\x04 and nothing more",
    "empty zip": b"PK\x05\x06" + bytes(18),
    "header that is no dictionary": b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((\n",
    "header cut short": b"\x93NUMPY\x01\x00\xff\xff{'descr'",
    "header with a NUL": b"\x93NUMPY\x01\x00\x08\x00{'a\x00': \n",
    "header with numbers for names": b"\x93NUMPY\x01\x00\x08\x00{1: 2} \n",
    "header in no encoding": b"\x93NUMPY\x03\x00\x04\x00\x00\x00\xff\xfe\xff\n",
    "version of nobody": b"\x93NUMPY\x63\x00",
    "shape beyond memory": b"\x93NUMPY\x01\x00\x48\x00"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 4)}".ljust(71) % 2**62
    + b"\n",
}


@pytest.mark.parametrize("name", ["logits_1", "label_0", "routing", "labels"])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_array_is_one_error_that_names_it(folder, name, content):
    (folder / f"{name}.npy").write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}\.npy: .*Record again"):
        read_records(folder)


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_own_logits_and_labels_that_are_no_arrays_are_named(tmp_path, content):
    np.save(tmp_path / "good.npy", np.zeros((3, 2), np.float32))
    (tmp_path / "bad.npy").write_bytes(content)
    for logits, labels in ((["bad.npy"], "good.npy"), (["good.npy"], "bad.npy")):
        with pytest.raises(InputError, match=r"bad\.npy"):
            own_logits([tmp_path / one for one in logits], tmp_path / labels)


@pytest.mark.parametrize("answer", [-2, CLASSES, 2**31 - 1])
def test_recorded_answers_that_are_no_class_are_named(folder, answer):
    path = folder / "label_1.npy"
    answers = np.load(path)
    answers[7] = answer
    np.save(path, answers)
    with pytest.raises(InputError, match=rf"label_1\.npy: row 7 was answered {answer}, records\.json says 4 classes"):
        read_records(folder)
