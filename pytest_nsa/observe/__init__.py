"""In the pytest process while ranks run: whether they progress, and what they do when they stall."""
