"""How many autograd nodes each module's forward makes, without walking the graph.

Autograd numbers the nodes of a thread as it makes them; the difference of two numbers is how many were made in between.
The module that makes them is looked up only once per `STRIDE` nodes: a module that makes many is found often.
"""

import torch

from nsa.trace.board import Board

next_number = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
MANY_NODES = 1000  # nodes of a module; from so many on, the board names it
STRIDE = 64
NEVER = 1 << 62


class NodeCount:
    """Counts the nodes of the current forward by module, without those of the module's children.

    The observer reads `next_number` when a module's call begins and ends, and calls `made` if it has passed ``due``.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.due = NEVER

    def begin(self) -> None:
        """Reset for a forward."""
        self._own: dict[str, int] = {}
        self._most = MANY_NODES
        self._first = self._last = next_number()
        self.due = self._first + STRIDE
        self.board.number("nodes", 0)
        self.board.number("nodes_owned", 0)

    def made(self, number: int, name: str) -> None:
        """Count the nodes since the last call to the module ``name``, which is being called; ``number`` is the next one."""
        own = self._own[name] = self._own.get(name, 0) + number - self._last
        self._last, self.due = number, number + STRIDE
        if own > self._most:
            self._most = own
            self.board.text("nodes_module", name)
            self.board.number("nodes_owned", own)

    def end(self) -> None:
        """Store the forward's number of nodes; nodes that a backward makes are not counted."""
        self.board.number("nodes", next_number() - self._first)
        self.due = NEVER
