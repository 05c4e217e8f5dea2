"""Rows of many requests, batch by batch: who waits where, which batch is next, and how it is run."""
