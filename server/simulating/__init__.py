"""What a server would do under load, without serving: `offramp bench BUNDLE data --simulate`.

What batches and requests take is measured on this machine; which batches there are is decided by the scheduler's own
code, under a clock that isn't real.
"""
