"""One file a step; each is what the schema was then, and stays so."""
