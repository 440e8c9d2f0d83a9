"""The folder of a test as values."""
