"""A bundle's weight file as int8, for a repository or a wheel: a quarter of the bytes, and the same ones unpacked.

Matrices that are exactly int8 times a float32 a row are stored as those; whatever else is in the file, as it is.
Multiplying gives the same float32 on every machine, and the bundle's own digest proves it when it is loaded.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.records import UNREADABLE

WEIGHTS = "weights.bin"
PACKED = "weights.npz"
_ROWS, _COLUMNS = 0, 1  # along which axis of the stored matrix its scales lie


def _opened(small: NDArray[np.int8], scale: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    made = small.astype(np.float32)
    return np.multiply(made, scale[:, None] if axis == _ROWS else scale[None, :], out=made)


class WeightPacker:
    """Knows matrices as int8, finds them in a weight file, and writes what is left of it."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[NDArray[np.int8], NDArray[np.float32], int]] = {}
        self._sizes: set[int] = set()

    def know(self, small: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
        """small (rows, columns) int8, scale (rows, 1) float32 -> the float32 matrix that they stand for."""
        flat = scale.reshape(-1)
        whole = _opened(small, flat, _ROWS)
        turned = np.ascontiguousarray(small.T)  # exporters store what is multiplied from the right the other way round
        self._known[_digest(whole)] = (small, flat, _ROWS)
        self._known[_digest(_opened(turned, flat, _COLUMNS))] = (turned, flat, _COLUMNS)
        self._sizes.add(whole.nbytes)
        return whole

    def pack(self, bundle: Path, target: Path) -> None:
        """Write the bundle's weights to `target`, packed. Tensors are found at whatever 64-byte place they begin."""
        data = (bundle / WEIGHTS).read_bytes()
        parts: list[dict[str, Any]] = []
        arrays: dict[str, Any] = {}
        rest, at = bytearray(), 0
        while at < len(data):
            found = next(
                (self._known[key] for n in self._sizes if (key := _digest(data[at : at + n])) in self._known), None
            )
            if found is None:
                step = min(64, len(data) - at)
                rest += data[at : at + step]
                if parts and "raw" in parts[-1]:
                    parts[-1]["raw"] += step
                else:
                    parts.append({"raw": step})
                at += step
                continue
            small, scale, axis = found
            arrays[f"small_{len(parts)}"], arrays[f"scale_{len(parts)}"] = small, scale
            parts.append({"axis": axis})
            at += 4 * small.size
        arrays["rest"] = np.frombuffer(bytes(rest), np.uint8)
        arrays["parts"] = np.frombuffer(json.dumps(parts).encode(), np.uint8)
        np.savez_compressed(target / PACKED, **arrays)


def unpack(packed: Path, target: Path) -> Path:
    """A bundle whose weights were packed, as `target`: a folder that isn't there yet.

    Raises InputError where the folder is there already or can't be written, BundleError for a file that isn't what
    `pack` wrote. That its numbers are right is checked when the bundle is loaded.
    """
    try:
        target.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(f"folder: {target} already exists, expected one that isn't there yet.") from error
    except OSError as error:
        raise _not_written(target, error) from error
    try:
        for file in packed.iterdir():
            if file.name != PACKED:
                shutil.copyfile(file, target / file.name)  # not its mode: what is installed may be read-only
        with (target / WEIGHTS).open("wb") as out:
            for piece in _pieces(packed / PACKED):
                out.write(piece)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)  # so that it can be tried again
        if isinstance(error, OSError):
            raise _not_written(target, error) from error
        raise
    return target


def _pieces(packed: Path) -> Iterator[bytes]:
    """The weight file, tensor by tensor. Raises BundleError."""
    try:
        with np.load(packed, allow_pickle=False) as archive:
            rest, at = archive["rest"].tobytes(), 0
            for k, part in enumerate(json.loads(archive["parts"].tobytes())):
                if "raw" in part:
                    yield rest[at : at + part["raw"]]
                    at += part["raw"]
                else:
                    yield _opened(archive[f"small_{k}"], archive[f"scale_{k}"], part["axis"]).tobytes()
    except UNREADABLE as error:
        raise BundleError(f"{packed}: not packed weights ({error}). Install offramp again.") from error


def _not_written(target: Path, error: OSError) -> InputError:
    return InputError(f"folder: {target} can't be written ({error.strerror or error}), name another place.")


def _digest(data: Any) -> bytes:
    return hashlib.sha256(memoryview(data).cast("B") if not isinstance(data, bytes) else data).digest()


__all__ = ["PACKED", "WeightPacker", "unpack"]
