"""offramp.runtime.jobs: the offline jobs: record every exit, calibrate."""
