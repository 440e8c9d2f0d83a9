"""Looking at running ranks from outside: `board` (disturbs nobody), `progress`, `second_look` (only at a stand-still), `stacks`."""
