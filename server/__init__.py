"""offramp.server: FastAPI over the runtime."""
