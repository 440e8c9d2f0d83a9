"""In a rank: its process, what it runs, and what it shares with the other ranks."""
