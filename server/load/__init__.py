"""Load on a running server: who asks, how often, and what came of it (`offramp bench http://…`)."""
