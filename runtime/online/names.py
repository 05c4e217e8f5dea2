"""Names of requests, which their rows are kept under."""

import random
import time


def new_name() -> str:
    """32 hexadecimal digits that no other request has: microseconds since the epoch, and 72 random bits.

    In order of time, so that the store's index grows at its end: random ones are each put into another page, which all
    have to be written again; at 60,000 rows that made a row cost half as much again. Names, not secrets: os.urandom
    is a system call, in which Python's lock may go to another thread.
    """
    return f"{time.time_ns() // 1000:014x}{random.getrandbits(72):018x}"
