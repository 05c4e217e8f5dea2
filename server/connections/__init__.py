"""Connections that end: clients that send, read or leave too slowly are let go, and the server stops in time."""
