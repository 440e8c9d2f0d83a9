"""What other pytest plugins need from a session with ranks."""
