"""Pictures of every kind become the array the model was trained on, or one clear error."""

import io
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from offramp.runtime import InputError
from offramp.runtime.preprocess import Image, ImagePreprocessor

PIL = pytest.importorskip("PIL.Image")


def opened(dtype=np.float32, **fields):
    return ImagePreprocessor(Image(**{"input": "x", "height": 2, "width": 3, "scale": 1.0} | fields), dtype)


def encoded(pixels, kind="PNG", mode=None, **options):
    buffer = io.BytesIO()
    picture = PIL.fromarray(np.asarray(pixels))
    (picture if mode is None else picture.convert(mode)).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)


def test_layouts_orders_and_normalisation(pixels):
    data = encoded(pixels)
    assert (opened(layout="NHWC")([data])["x"][0] == pixels).all()
    assert (opened()([data])["x"][0] == pixels.transpose(2, 0, 1)).all()
    assert (opened(layout="NHWC", channels="BGR")([data])["x"][0] == pixels[:, :, ::-1]).all()
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 0.2]
    got = opened(layout="NHWC", scale=1 / 255, mean=mean, std=std)([data])["x"][0]
    np.testing.assert_allclose(got, (pixels / 255 - mean) / std, rtol=1e-5, atol=1e-5)


def test_paths_bytes_and_arrays_are_the_same(pixels, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(pixels))
    made = opened()([tmp_path / "a.png", str(tmp_path / "a.png"), encoded(pixels), pixels])["x"]
    assert (made == made[0]).all()


def test_an_integer_input_gets_rounded_values_in_range():
    grey = np.array([[0, 128, 255]], np.uint8)
    assert opened(np.uint8, layout="NHW", channels="L", height=1, scale=16 / 255)([grey])["x"].tolist() == [
        [[0, 8, 16]]
    ]
    assert opened(np.uint8, layout="NHW", channels="L", height=1, scale=2.0)([grey])["x"].tolist() == [[[0, 255, 255]]]


def test_no_pictures_are_no_rows():
    assert opened()([])["x"].shape == (0, 3, 2, 3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
def test_every_png_mode_of_the_same_picture_is_the_same(mode):
    grey = np.array([[0, 255, 0], [255, 255, 0]], np.uint8)
    data = encoded(grey.astype(np.uint16) * 257) if mode == "I;16" else encoded(grey, mode=mode)
    assert (opened(layout="NHWC")([data])["x"][0] == grey[:, :, None]).all()
    assert (opened(layout="NHW", channels="L")([data])["x"][0] == grey).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_modes(mode):
    data = encoded(np.full((2, 3), 200, np.uint8), "JPEG", mode, quality=95)
    assert np.abs(opened()([data])["x"] - 200).max() <= 3


def test_transparent_pixels_show_the_background():
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[..., 0], rgba[0, :, 3], rgba[1, :, 3] = 100, 255, 0
    made = opened(layout="NHWC", background=[1, 2, 3])([encoded(rgba)])["x"][0]
    assert (made[0] == [100, 0, 0]).all()
    assert (made[1] == [1, 2, 3]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation):
    upright = np.kron(np.array([[0, 60, 120], [180, 220, 255]], np.uint8), np.ones((16, 16), np.uint8))
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: np.rot90(upright.T, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = PIL.Exif()
    exif[0x0112] = orientation
    data = encoded(np.ascontiguousarray(stored), "JPEG", quality=95, exif=exif)
    made = opened(height=32, width=48, layout="NHW", channels="L", resize=None)([data])["x"][0]
    assert np.abs(made - upright).max() <= 12


def test_resizing_stretches_crops_or_pads():
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 4:] = 200
    four = {"height": 4, "width": 4, "layout": "NHWC", "interpolation": "nearest"}
    assert opened(**four)([wide])["x"][0, 0, :, 0].tolist() == [0, 0, 200, 200]
    assert opened(**four, resize="crop")([wide])["x"][0, 0, :, 0].tolist() == [0, 0, 200, 200]
    padded = opened(**four, resize="pad", background=[9, 9, 9])([wide])["x"][0, :, :, 0]
    assert padded.tolist() == [[9] * 4, [0, 0, 200, 200], [0, 0, 200, 200], [9] * 4]
    with pytest.raises(InputError, match="row 0: 8 x 4 pixels, expected 4 x 4"):
        opened(**four, resize=None)([wide])


def test_crop_equals_resize_the_shorter_side_then_cut_the_middle():
    picture = PIL.fromarray(np.random.default_rng(1).integers(0, 256, (50, 71, 3), np.uint8))
    small = picture.resize((int(32 * 71 / 50), 32), PIL.Resampling.BILINEAR)
    left, top = round((small.width - 28) / 2), round((32 - 28) / 2)
    expected = np.asarray(small.crop((left, top, left + 28, top + 28)))
    made = opened(height=28, width=28, resize="crop", shorter=32, layout="NHWC")([np.asarray(picture)])
    assert (made["x"][0] == expected).all()


def bomb(width, height):
    """A PNG of a few bytes that claims any number of pixels."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8000, 10_000, 50_000, 2**31 - 1])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side):
    with pytest.raises(InputError, match="row 0"):
        opened()([bomb(side, side)])


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_broken_pictures_are_refused_by_row(kind):
    whole = encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), kind)
    for damaged in (b"", b"GIF89a", whole[:20], whole[: len(whole) // 2], b"\0" * 100, whole[:8] + b"\xff" * 50):
        with pytest.raises(InputError, match=r"row 5.*can't be read as a PNG or JPEG"):
            opened()([damaged], first=5)


def test_no_damage_escapes_as_another_error():
    whole = bytearray(encoded(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)))
    random = np.random.default_rng(1)
    for _ in range(300):
        damaged = whole.copy()
        for at in random.integers(0, len(whole), 3):
            damaged[at] = random.integers(0, 256)
        with suppress(InputError):
            assert np.isfinite(opened()([bytes(damaged)])["x"]).all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b"\x89PNG", "expected a list of them, got one bytes"),
        (["/nowhere/a.png"], r"row 0 \(/nowhere/a\.png\): can't be read"),
        ([np.zeros((2, 2), np.float32)], "an array of float32, expected uint8"),
        ([None], "row 0: can't be read"),
    ],
)
def test_what_is_no_picture_is_refused(rows, message):
    with pytest.raises(InputError, match=message):
        opened()(rows)


def test_a_missing_library_names_the_extra(monkeypatch):
    import sys

    from offramp.runtime import RuntimeUnavailable

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RuntimeUnavailable, match=r'pip install "\.\[image\]"'):
        opened()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def broken(made):
    return made[:-1] + bytes([made[-1] ^ 1])


LONG = zlib.compress(b"a" * 1_500_000)
BESIDE = {
    "EXIF that is none": [chunk(b"eXIf", b"garbage")],
    "EXIF that ends early": [chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1")],
    "EXIF as a text, not hexadecimal": [chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 4\nzz")],
    "a long text": [chunk(b"zTXt", b"k\0\0" + LONG)],
    "a long international text": [chunk(b"iTXt", b"k\0\1\0\0\0" + LONG)],
    "many long texts": [chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 1_000_000))] * 70,
    "a text of another compression": [chunk(b"zTXt", b"k\0\7xx")],
    "a text with a wrong sum": [broken(chunk(b"tEXt", b"a\0b"))],
    "a long profile": [chunk(b"iCCP", b"k\0\0" + LONG)],
    "half a profile": [chunk(b"iCCP", b"x")],
    "half a gamma": [chunk(b"gAMA", b"")],
    "half a resolution": [chunk(b"pHYs", b"1")],
    "half an animation": [chunk(b"acTL", b"12")],
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("beside", BESIDE)
def test_what_lies_beside_the_pixels_of_a_png_cannot_spoil_them(pixels, tmp_path, beside, where):
    data, more = encoded(pixels), b"".join(BESIDE[beside])
    at = 33 if where == "before" else len(data) - 12
    data = data[:at] + more + data[at:]
    (tmp_path / "a.png").write_bytes(data)
    made = opened(layout="NHWC")([data, bytearray(data), tmp_path / "a.png", str(tmp_path / "a.png")])["x"]
    assert (made == pixels).all()


@pytest.mark.parametrize("orientation", range(10))
def test_a_picture_is_turned_as_its_exif_says_though_a_text_is_too_long(pixels, orientation):
    from PIL import Image as Pillow
    from PIL import ImageOps

    block = Pillow.Exif()
    block[0x0112] = orientation
    data = encoded(pixels, exif=block)
    size = {"height": 3, "width": 2} if 5 <= orientation <= 8 else {}
    expected = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))))
    long = data[:33] + chunk(b"zTXt", b"k\0\0" + LONG) + data[33:]
    assert (opened(layout="NHWC", **size)([data, long])["x"] == expected).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\0\1"]
)
def test_a_jpeg_with_damaged_exif_is_its_pixels(pixels, exif):
    data = encoded(pixels, "JPEG")
    odd = data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]
    assert (opened()([odd])["x"] == opened()([data])["x"]).all()


def test_damage_to_the_pixels_themselves_is_refused_still(pixels):
    data = encoded(pixels)
    text = chunk(b"zTXt", b"k\0\0" + LONG)
    start = data.index(b"IDAT") + 4
    damaged = data[:start] + bytes([data[start] ^ 255]) + data[start + 1 :]
    for wrong in (damaged, data[:33] + text + damaged[33:], data[:33] + text + data[33 : start + 5], data[:20]):
        with pytest.raises(InputError, match="row 0: can't be read as a PNG or JPEG picture"):
            opened()([wrong])
