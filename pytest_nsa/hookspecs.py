"""Hooks that a downstream repository may implement, in a conftest.py or a plugin.

``examples/downstream/tests/conftest.py`` has one of each. In a conftest.py mark them ``@pytest.hookimpl(optionalhook=True)``, so
that ``-p no:nsa`` finds nothing unknown. An error in an implementation is reported; verdicts and reports are written all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from pytest_nsa.diagnosis.causes import Cause
    from pytest_nsa.diagnosis.decision import Decision
    from pytest_nsa.diagnosis.verdict import Fact, Finding, Verdict
    from pytest_nsa.evidence.values import Evidence

    CauseAndRule = tuple[Cause, Callable[[Evidence], Finding | None]]


@pytest.hookspec(firstresult=True)
def pytest_nsa_decide(verdicts: Mapping[str, Verdict]) -> Decision | None:
    """Decide over a whole run, from its ``verdicts`` by scenario, or by test where none is a scenario.

    Called once, at the end of the session, by the process that writes the reports. Return None to leave the decision to others;
    the plugin's own is about the most frequent cause, and its surest verdict. The sentence heads SUMMARY.md, report.html and the
    closing lines.
    """


def pytest_nsa_causes(config: pytest.Config) -> Iterable[CauseAndRule] | None:
    """Add causes to those that a verdict may name, each with the rule that finds it.

    Called once per process that collects tests. A rule takes the evidence of a test that did not pass, and returns a `Finding`
    of its cause, or None. It is called before the plugin's rules, and only for the verdict, never while the test runs. The mark
    ``fails_as`` accepts these causes too. ``pytest-nsa diagnose`` does not know them: it loads no conftest.py.
    """


def pytest_nsa_collect_evidence(folder: Path, pids: Mapping[int, int]) -> Iterable[Fact] | None:
    """Add facts from another source (a scheduler, a switch, a sidecar) to a test before its ranks are stopped.

    Called on the host while the ranks still stall. ``folder`` is the test's, for files; ``pids`` are the processes by rank. Facts
    appear in `Evidence.external` for rules, and with the verdict. After 5 s the run goes on without them.
    """


def pytest_nsa_scenarios(config: pytest.Config) -> Mapping[str, str] | None:
    """Return the table of a diagnostic plan: the names of its scenarios, and what a failure of each means ('' for nothing).

    A test with a mark ``scenario`` of another name fails, and SUMMARY.md lists the scenarios that did not run.
    """


def pytest_nsa_environment(config: pytest.Config, rank: int, world_size: int) -> Mapping[str, str] | None:
    """Return environment variables for a rank.

    Called in each rank before its group is formed. What torch reads when it is imported (in the process that ranks are forked
    from) must be in pytest's own environment. Those that number the ranks cannot be changed.
    """


@pytest.hookspec(firstresult=True)
def pytest_nsa_wrap_model(
    config: pytest.Config, model: nn.Module, parallel: str, device: str, options: dict[str, Any]
) -> nn.Module | None:
    """Wrap a model in place of ``ddp.wrap`` (``parallel='ddp'``) or ``fsdp.wrap`` ('fsdp'); None leaves it to them.

    Called in a rank; ``options`` are those that the test gave.
    """
