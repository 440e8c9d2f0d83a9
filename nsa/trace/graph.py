"""How many autograd nodes each module's forward makes, without walking the graph.

Autograd numbers the nodes of a thread as it makes them; the difference between two moments is what was made between them.
"""

from __future__ import annotations

import torch

from nsa.trace.board import Board

_next_number = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
TELLING = 1000  # nodes of a module, from which on the board names it


class NodeCount:
    """Nodes of the current forward by module, each module's own: those of its children are theirs."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.begin()

    def begin(self) -> None:
        """Another forward."""
        self._open: list[list[int]] = []  # of each module that is being called: its first number, its children's nodes
        self._own: dict[str, int] = {}
        self._most = TELLING
        self._first = _next_number()
        self.board.number("nodes", 0)
        self.board.number("nodes_owned", 0)

    def enter(self) -> None:
        """A module's forward begins."""
        self._open.append([_next_number(), 0])

    def leave(self, name: str) -> None:
        """It has ended."""
        if not self._open:
            return
        first, inner = self._open.pop()
        now = _next_number()
        if self._open:
            self._open[-1][1] += now - first
        own = self._own[name] = self._own.get(name, 0) + now - first - inner
        if own > self._most:
            self._most = own
            self.board.text("nodes_module", name)
            self.board.number("nodes_owned", own)
        if not self._open:
            self.board.number("nodes", now - self._first)
