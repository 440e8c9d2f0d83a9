"""What a rank records of its stall and end: heartbeat, stacks, loop counters, exceptions, exits."""
