"""What processes exchange: messages and files. Imports nothing else of this package."""
