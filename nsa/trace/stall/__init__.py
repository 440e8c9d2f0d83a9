"""What a rank knows of its own stall and end: heartbeat, stacks, loop counters, exceptions, exits."""
