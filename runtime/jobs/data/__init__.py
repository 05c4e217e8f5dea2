"""The jobs' rows: files to record, opened records, labelled rows and their parts, a point's figures on them."""
