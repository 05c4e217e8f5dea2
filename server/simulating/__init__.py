"""What a server would do under load, without serving: `offramp bench BUNDLE data --simulate`.

What batches and requests take is drawn from the record of a server that is asked here; which batches there are is
decided by the scheduler's own code, under a clock that isn't real.
"""
