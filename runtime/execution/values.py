"""What a caller is told whose values a graph can't run on."""

import re

from offramp.runtime.errors import InputError

OUT_OF_RANGE = "an index is out of range"


def cannot_run(file: str, why: str) -> InputError:
    """The one error for it, whoever noticed. file: the graph's. why: in a few words."""
    return InputError(
        f"{file} can't run on these values ({why}): "
        "for instance an id outside the vocabulary, or a row longer than the model takes."
    )


def about_values(error: Exception) -> bool:
    """Whether an error of ONNX Runtime, whose exceptions have no base of their own, may be about a caller's values.

    Memory and the device aren't the caller's fault.
    """
    return not ("llocat" in str(error) or "CUDA" in str(error))


def reason(error: Exception) -> str:
    """What ONNX Runtime says went wrong, without the places in its source where it noticed."""
    message = " ".join(str(error).rpartition("Status Message: ")[2].split())
    return re.sub(r"^/\S+:\d+ .*?(was false\.|\)) ", "", message)
