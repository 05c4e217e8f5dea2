"""Searches that calibrators are fitted with: temperatures, and the vector behind a confidence."""
