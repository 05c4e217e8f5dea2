"""Large bodies are decoded in processes of their own: a JSON parser holds Python's lock for as long as it works."""
