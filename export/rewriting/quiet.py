"""Rewriters that print and log what is nobody's business."""

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quietly(name: str) -> Iterator[None]:
    """Without what the library of that name logs below errors, and what it prints."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
