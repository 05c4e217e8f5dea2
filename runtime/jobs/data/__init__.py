"""Where the jobs' rows come from: files of arrays, texts and pictures."""
