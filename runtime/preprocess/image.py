"""PNG and JPEG pictures to arrays. Needs Pillow, loaded when the first one is opened."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError, RuntimeUnavailable, how_to_install
from offramp.runtime.preprocess.spec import Image

_FORMATS = ("PNG", "JPEG")
_PNG = b"\x89PNG\r\n\x1a\n"
_ORIENTATION = 0x0112
_TURNED = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
Values = NDArray[Any]


class ImagePreprocessor:
    """Pictures in, the model's input out. Any number of threads may use it at once."""

    def __init__(self, spec: Image, dtype: Any) -> None:
        self.spec = spec
        self._dtype = np.dtype(dtype)
        self._pillow = _pillow()

    def __call__(self, rows: Iterable[Any], *, first: int = 0) -> dict[str, Values]:
        """The model's input for pictures: paths, the bytes of files, or (height, width[, 3 or 4]) uint8 arrays.

        first: number of the first row, for messages. Raises InputError naming the row (and its path) for what
        is no whole PNG or JPEG, has too many pixels, or another size than the model's where none is resized.
        """
        if isinstance(rows, str | bytes | Path):
            raise InputError(f"pictures: expected a list of them, got one {type(rows).__name__}.")
        made = [self._picture(picture, row) for row, picture in enumerate(rows, first)]
        return {self.spec.input: np.stack(made) if made else np.zeros((0, *self.spec.shape), self._dtype)}

    def parts(self, rows: Iterable[Any], *, first: int = 0) -> list[tuple[NDArray[np.int64], dict[str, Values]]]:
        """(positions, inputs): all rows in one."""
        inputs = self(rows, first=first)
        return [(np.arange(len(inputs[self.spec.input])), inputs)]

    def _picture(self, picture: Any, row: int) -> Values:
        where = f"row {row}" if not isinstance(picture, str | Path) else f"row {row} ({picture})"
        try:
            return self._values(self._fitted(self._upright(picture, where), where))
        except InputError:
            raise
        except Exception as error:  # decoders on hostile bytes raise anything
            raise InputError(f"{where}: can't be read as a PNG or JPEG picture ({error}).") from error

    def _upright(self, picture: Any, where: str) -> Any:
        """The decoded picture, turned as its EXIF says, in the model's colours."""
        pillow = self._pillow
        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8:
                raise InputError(f"{where}: an array of {picture.dtype}, expected uint8 0…255.")
            opened = pillow.Image.fromarray(picture)
            return self._coloured(opened)
        source = io.BytesIO(picture) if isinstance(picture, bytes | bytearray | memoryview) else picture
        try:
            decoded = self._decoded(source, where)
        except InputError:
            raise
        except Exception:
            data = Path(picture).read_bytes() if isinstance(picture, str | Path) else bytes(picture)
            if (pixels := _pixels_alone(data)) is None:
                raise
            decoded = self._decoded(io.BytesIO(pixels), where)
        return self._coloured(_eight_bits(decoded, pillow))

    def _decoded(self, source: Any, where: str) -> Any:
        pillow = self._pillow
        with pillow.Image.open(source, formats=_FORMATS) as opened:
            # Before any pixel is decoded: a small file may claim gigabytes of them.
            if opened.width * opened.height > self.spec.max_pixels:
                raise InputError(
                    f"{where}: {opened.width} x {opened.height} pixels, expected at most {self.spec.max_pixels}."
                )
            opened.load()
            try:
                turned = _TURNED.get(opened.getexif().get(_ORIENTATION))
            except Exception:  # a damaged block says nothing of how the camera was held; the pixels are whole
                turned = None
            return opened.transpose(pillow.Image.Transpose[turned]) if turned else opened.copy()

    def _coloured(self, picture: Any) -> Any:
        if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            behind = self._pillow.Image.new("RGBA", picture.size, (*self.spec.background, 255))
            picture = self._pillow.Image.alpha_composite(behind, picture)
        return picture.convert("L" if self.spec.channels == "L" else "RGB")

    def _fitted(self, picture: Any, where: str) -> Any:
        spec = self.spec
        width, height = picture.size
        wanted = (spec.width, spec.height)
        if picture.size == wanted and spec.shorter is None:
            return picture
        if spec.resize is None:
            raise InputError(f"{where}: {width} x {height} pixels, expected {spec.width} x {spec.height}.")
        filter_ = getattr(self._pillow.Image.Resampling, spec.interpolation.upper())
        if spec.resize == "stretch":
            return picture.resize(wanted, filter_)
        if spec.resize == "pad":
            ratio = min(spec.width / width, spec.height / height)
            small = picture.resize((max(1, round(width * ratio)), max(1, round(height * ratio))), filter_)
            fill = self._pillow.Image.new("RGB", (1, 1), tuple(spec.background)).convert(picture.mode).getpixel((0, 0))
            around = self._pillow.Image.new(picture.mode, wanted, fill)
            around.paste(small, ((spec.width - small.width) // 2, (spec.height - small.height) // 2))
            return around
        return self._cropped(picture, where, filter_)

    def _cropped(self, picture: Any, where: str, filter_: Any) -> Any:
        """The middle, after the shorter side has become `shorter`; sizes are rounded as torchvision's are."""
        spec = self.spec
        width, height = picture.size
        shorter = spec.shorter or max(spec.height, spec.width)
        longer = int(shorter * max(width, height) / min(width, height))
        if longer * shorter > spec.max_pixels:
            raise InputError(f"{where}: {width} x {height} pixels is too long and thin for a picture.")
        size = (shorter, longer) if width <= height else (longer, shorter)
        if size != picture.size:
            picture = picture.resize(size, filter_)
        left, top = round((size[0] - spec.width) / 2), round((size[1] - spec.height) / 2)
        return picture.crop((left, top, left + spec.width, top + spec.height))

    def _values(self, picture: Any) -> Values:
        spec = self.spec
        values: Values = np.asarray(picture, np.float32)
        if values.ndim == 2:
            values = values[:, :, None]
        if spec.channels == "BGR":
            values = values[:, :, ::-1]
        values = values * np.float32(spec.scale)
        if spec.mean:
            values = values - np.array(spec.mean, np.float32)
        if spec.std:
            values = values / np.array(spec.std, np.float32)
        if self._dtype.kind in "iu":
            limits = np.iinfo(self._dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        values = values.astype(self._dtype)
        if spec.layout == "NCHW":
            return np.ascontiguousarray(values.transpose(2, 0, 1))
        return np.ascontiguousarray(values[:, :, 0] if spec.layout == "NHW" else values)


def _eight_bits(picture: Any, pillow: Any) -> Any:
    """16-bit grey as 8-bit grey: Pillow's own conversion cuts everything above 255 off."""
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture).astype(np.int64)
    return pillow.Image.fromarray((np.clip(values, 0, 65535) // 257).astype(np.uint8))


def _pixels_alone(data: bytes) -> bytes | None:
    """A PNG without what doesn't make its pixels, such as texts, profiles and dates; None if that is nothing.

    Pillow refuses a picture for any of these that is damaged or long.
    """
    if not data.startswith(_PNG):
        return None
    kept, at = [_PNG], len(_PNG)
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        if kind[:1].isupper() or kind in (b"tRNS", b"eXIf"):
            kept.append(data[at:end])
        at = end
    alone = b"".join(kept)
    return alone if len(alone) < len(data) else None


def _pillow() -> Any:
    try:
        import PIL
        import PIL.Image
    except ImportError as error:
        raise RuntimeUnavailable(
            f"pictures need the library Pillow, which isn't installed. {how_to_install('image')}"
        ) from error
    return PIL
