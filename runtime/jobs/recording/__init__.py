"""The record job: every exit of a bundle, on data, into a folder of records."""
