"""The command pytest-nsa."""
