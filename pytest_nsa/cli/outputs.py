"""Output of `watch` for programs: a command per verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Status = dict[str, Any]  # what `Watcher.to_json` returns


@dataclass
class VerdictCommand:
    """Runs a shell command once per verdict or suspicion, without waiting for it.

    It gets the verdict as JSON on its standard input, and NSA_CAUSE, NSA_RANKS (comma separated), NSA_RETRY and NSA_CERTAIN
    (1 or 0) in its environment.
    """

    command: str
    _reported: set[str] = field(default_factory=set)
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def give(self, statuses: Sequence[Status]) -> None:
        """Run the command for each new verdict."""
        for status in statuses:
            verdict = status["verdict"]
            if verdict is None:
                continue
            key = json.dumps([status["folder"], verdict["cause"], verdict["ranks"], verdict["certain"]])
            if key not in self._reported:
                self._reported.add(key)
                self._run({**verdict, "folder": status["folder"]})
        self._running = [run for run in self._running if run.poll() is None]

    def _run(self, verdict: dict[str, Any]) -> None:
        environment = {
            **os.environ, "NSA_CAUSE": verdict["cause"], "NSA_RANKS": ",".join(map(str, verdict["ranks"])),
            "NSA_RETRY": verdict["retry"], "NSA_CERTAIN": str(int(verdict["certain"])),
        }  # fmt: skip
        # In memory: a pipe would wait for a command that does not read it, and a disk may be full.
        with open(os.memfd_create("verdict"), "w+", encoding="utf-8") as given:
            given.write(json.dumps(verdict) + "\n")
            given.seek(0)
            run = subprocess.Popen(self.command, shell=True, env=environment, stdin=given, stdout=sys.stderr)
        self._running.append(run)

    def finish(self, seconds: float = 60.0) -> None:
        """Wait for the commands that still run, for ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        for run in self._running:
            try:
                run.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"warning: --on-verdict {self.command!r}: still runs after {seconds:g} s", file=sys.stderr)
