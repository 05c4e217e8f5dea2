"""Pages that nobody needs any more are given back.

ONNX Runtime maps a weight file, packs the matrices for its kernels and, inside nested graphs, keeps the mapping
of what it has packed: MiniLM's cascade graph held 36 MB of pages that are never read again.
"""

import ctypes
import sys
from pathlib import Path

_MADV_PAGEOUT = 21  # Linux 5.4; drops clean pages, which come back from the file if somebody reads them after all
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's names
# Inputs of a batch that are larger take a thousand times longer to run than to be mapped anew.
_LARGE = 2**20


def release_mapped(folder: Path) -> None:
    """Ask the kernel to drop this process's mapped pages of files in `folder`. Does nothing where it can't."""
    if not sys.platform.startswith("linux"):
        return
    inside = f"{folder.resolve()}/"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(inside):
                start, end = (int(edge, 16) for edge in fields[0].split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)
    except (OSError, AttributeError, ValueError):
        return


def release_freed() -> None:
    """Ask the C library to give back what has been freed: sessions that were closed one after the other otherwise
    left their size behind, several times in all. Does nothing where it can't.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library than glibc
        return


def give_back_large() -> None:
    """Have the C library give back what is large as soon as it is freed, from now on. Does nothing where it can't.

    By itself glibc keeps blocks of up to 32 MB for the next one, once there was one. A server that looks at a window of
    its rows every minute grew by 40 MB for what it needs for half a second.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)
    except (OSError, AttributeError, TypeError):  # another C library than glibc
        return
