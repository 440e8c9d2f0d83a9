"""The ranked test: a `pytest.Function` whose body runs on ranks, so skip, xfail, junit and reruns work as for any test."""

import bdb
import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprFileLocation, ReprTraceback
from _pytest.junitxml import xml_key
from _pytest.skipping import Xfail, xfailed_key
from _pytest.unittest import TestCaseFunction

from pytest_nsa import marked, marks
from pytest_nsa.diagnosis.verdict import Verdict, describe_ranks
from pytest_nsa.evidence.source import LOCATION
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.host_fixtures import make_host_values
from pytest_nsa.rank import lockstep
from pytest_nsa.rank.context import current_rank
from pytest_nsa.rank.coverage import add_lines_of_ranks
from pytest_nsa.report import terminal
from pytest_nsa.session import phases
from pytest_nsa.session.reports import ReprEntryNative, item_properties, repeat_warnings, suite_properties
from pytest_nsa.session.runner import RankRunner

runner_key = pytest.StashKey[RankRunner]()
timeout_key = pytest.StashKey[float]()
func_only_key = pytest.StashKey[bool]()  # whether the limit is for the call alone
verdict_key = pytest.StashKey[Verdict]()
values_key = pytest.StashKey[dict[str, Any]]()
folder_key = pytest.StashKey[Path]()
teardown_key = pytest.StashKey[tuple["RankFailure", Sequence[phases.Failure]] | None]()
exit_key = pytest.StashKey[Callable[[], NoReturn] | None]()  # a rank's call of pytest.exit, where other ranks failed
skipped_key = pytest.StashKey[tuple[str, int]]()  # file and line of the skip on the ranks


class RankFailure(Exception):
    """The test failed on its ranks. Carries the verdict, and the report's text.

    Not the evidence: pytest keeps exceptions for the whole session, and boards are large.
    """

    def __init__(self, verdict: Verdict, report: str) -> None:
        Exception.__init__(self, verdict.reason)
        self.verdict, self.report = verdict, report
        self.in_setup = False  # whether the culprits failed in a fixture, not in the body

    # The culprit's type may define these, and read attributes that this instance lacks.
    __hash__ = Exception.__hash__
    __repr__ = Exception.__repr__

    def __str__(self) -> str:
        return self.verdict.reason

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a failure of ranks has no attribute {name!r}")


def rank_failure(verdict: Verdict, evidence: Evidence, *, shown: bool, verbose: bool = False) -> RankFailure:
    """Return the failure, also an instance of what the culprit raised where this process knows that type: for xfail(raises=...).

    With ``shown`` it is a BdbQuit too: --pdb has attached to the rank, and pytest shall not show the host's frames.
    """
    bases: tuple[type[BaseException], ...] = (RankFailure, bdb.BdbQuit) if shown else (RankFailure,)
    report = terminal.failure(verdict, evidence, verbose=verbose)
    raised = next((e for r in evidence.ranks if r.rank in verdict.ranks for e in r.exceptions), None)
    kind = getattr(sys.modules.get(raised.module), raised.type, None) if raised is not None else None
    ends_session = (KeyboardInterrupt, pytest.exit.Exception)
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, ends_session):
        # Two layouts may conflict, and a type may refuse to be inherited, made or changed.
        with contextlib.suppress(Exception):
            return type("RankFailure", (*bases, kind), {})(verdict, report)
    return type("RankFailure", bases, {})(verdict, report)


class _NotRaised(Exception):
    """Raised by nothing: what xfail is made to expect where it does not expect what the ranks raised."""


def _about_the_unexpected(verdict: Verdict, odd: Sequence[phases.Failure], root: Path) -> Verdict:
    """Return a verdict with the failure that the mark xfail does not expect; about it, where an expected exception came first."""
    error = next((e for e in odd[0].rank.exceptions if e.when == odd[0].phase), None)
    if error is None or verdict.cause != "rank_exception" or {f.rank.rank for f in odd} & {*verdict.ranks}:
        return replace(verdict, reason=f"{verdict.reason} (xfail does not expect {odd[0].describe()})")
    ranks = tuple(f.rank.rank for f in odd if f.rank.exceptions and f.rank.exceptions[0].type == error.type)
    expected = describe_ranks(verdict.ranks, verdict.world_size)
    return replace(
        verdict, ranks=ranks, where=error.where.replace(f"{root}/", ""), called_from="",
        reason=f"{error.type}: {error.headline[:200]} (xfail does not expect it; {expected} failed as expected)",
    )  # fmt: skip


class Ranked(pytest.Function):
    """A test whose body runs on ranks. On the host `setup` makes the host's fixtures and `runtest` launches; in a rank both are
    pytest's own.
    """

    def setup(self) -> None:
        if current_rank() is not None:
            super().setup()
        else:
            self._refuse_missing_fixtures()
            self.stash[values_key] = make_host_values(self)
            if lockstep.is_hypothesis_test(self):
                lockstep.relax(self)

    def _refuse_missing_fixtures(self) -> None:
        """Raise what pytest raises for a fixture that is not defined, before ranks are started.

        A fixture that another plugin's hook has added to ``fixturenames`` is not in the item's own table.
        """
        known, manager = self._fixtureinfo.name2fixturedefs, self.session._fixturemanager
        node: Any = self if pytest.version_tuple >= (8,) else self.nodeid
        for name in self.fixturenames:
            if name == "request" or name in self.funcargs or known.get(name) or manager.getfixturedefs(name, node):
                continue
            self._request.getfixturevalue(name)

    def runtest(self) -> None:
        if current_rank() is not None:
            super().runtest()
            return
        __tracebackhide__ = True
        runner = self.config.stash[runner_key]
        verdict, evidence, found = runner.run_item(
            self,
            self.stash.get(timeout_key, None),
            self.stash[values_key],
            func_only=self.stash.get(func_only_key, False),
        )
        self.stash[verdict_key] = verdict
        self.stash[folder_key] = evidence.folder
        self._take_over(evidence)
        add_lines_of_ranks(self, evidence.folder)
        runner.remove_passed(self, verdict, evidence.folder)
        repeat_warnings(self, evidence)
        if any(rank.quit_debugger for rank in evidence.ranks):
            pytest.exit("Quitting debugger")
        called = next((rank.pytest_exit for rank in evidence.ranks if rank.pytest_exit), None)
        if called is not None:
            end = functools.partial(pytest.exit, called["reason"], called.get("returncode"))
            if all(f.rank.pytest_exit or f.follows or f.rank.by_us for f in (*found.body, *found.teardown)):
                end()
            self.stash[exit_key] = end  # after the reports
        verdict = self._compare_with_marks(verdict, found)
        shown = self.config.getoption("usepdb", False)
        if found.teardown:
            self.stash[teardown_key] = (
                rank_failure(verdict, evidence, shown=shown, verbose=self.config.getoption("nsa_verbose")),
                found.teardown,
            )
        if found.body:
            failure = rank_failure(verdict, evidence, shown=shown, verbose=self.config.getoption("nsa_verbose"))
            failure.in_setup = phases.is_in_setup(found, verdict)
            self._expect(found.body)
            del evidence, found  # the traceback keeps this frame
            raise failure
        if evidence.ranks and all(rank.skipped is not None for rank in evidence.ranks):
            self.stash[skipped_key] = self._find_place(str(evidence.ranks[0].left.get("where", "")))
            pytest.skip(evidence.ranks[0].skipped or "skipped")
        if found.mark is not None:
            self.stash[xfailed_key] = Xfail(found.mark.reason, True, found.mark.strict, None)
        elif self.stash.get(xfailed_key, None) is not None and not verdict.failed:
            # A condition that holds here and on no rank. Not None, for which pytest would evaluate it again.
            nothing: Any = False
            self.stash[xfailed_key] = nothing

    def _expect(self, failures: Sequence[phases.Failure]) -> None:
        """Make pytest apply the mark xfail of the ranks that failed to a phase as a whole."""
        mark = next((f.mark for f in failures if f.mark is not None and not f.follows), None)
        raises = None if phases.all_expected(failures) else _NotRaised
        if mark is None and self.stash.get(xfailed_key, None) is None:
            return  # other plugins read it
        reason, strict = (mark.reason, mark.strict) if mark is not None else ("", False)
        self.stash[xfailed_key] = Xfail(reason, True, strict, raises)

    def _compare_with_marks(self, verdict: Verdict, found: phases.Phases) -> Verdict:
        """Return the verdict, with what the marks xfail and fails_as do not expect; xfail here if fails_as expects all of it."""
        foreseen = marked.value(self, "fails_as")
        odd = phases.unexplained(found, verdict) if foreseen is not None else phases.not_expected(found)
        if foreseen is not None and verdict.cause == foreseen and not odd:
            pytest.xfail(f"{foreseen}, as expected: {verdict.reason}")
        changed = verdict
        is_without = foreseen is not None and not verdict.failed and verdict.outcome != "SKIP"
        if is_without:
            reason = f"expected to fail as {foreseen}, but passed"
            changed = replace(
                verdict, outcome="FAIL", cause="assertion", rule="items.foreseen", reason=reason, advice="remove the mark fails_as"
            )  # fmt: skip
        elif foreseen is not None and verdict.failed:
            also = f" alone; {odd[0].describe()}" if odd and verdict.cause == foreseen else ""
            changed = replace(verdict, reason=f"{verdict.reason} (fails_as expected {foreseen}{also})")
        elif odd and any(f.mark is not None for f in (*found.body, *found.teardown)):
            changed = _about_the_unexpected(verdict, odd, self.config.rootpath)
        if changed is not verdict:
            self.stash[verdict_key] = changed
            self.config.stash[runner_key].recorder.replace(self.stash[folder_key], changed)
        if is_without:
            pytest.fail(changed.reason, pytrace=False)
        return changed

    def teardown(self) -> None:
        if current_rank() is not None:
            super().teardown()
            return
        failed, end = self.stash.get(teardown_key, None), self.stash.get(exit_key, None)
        self.stash[teardown_key] = self.stash[exit_key] = None
        if failed is not None:
            self._expect(failed[1])
            raise failed[0]
        if end is not None:
            end()

    def _take_over(self, evidence: Evidence) -> None:
        """Copy the properties that the test recorded to this item, and what the ranks printed, unless it has been shown (`-s`)."""
        self.user_properties.extend(item_properties(evidence.ranks))
        log = self.config.stash.get(xml_key, None)
        if log is not None:
            for name, value in suite_properties(evidence.ranks):
                log.add_global_property(name, value)
        verdict = self.stash[verdict_key]
        if verdict.failed:
            self.user_properties.append(("nsa.verdict", terminal.headline(verdict)))
        if verdict.failed or self.config.getoption("capture", "no") != "no":
            for title, body in terminal.sections(evidence):
                self.add_report_section("call", title, body)

    def _repr_failure_py(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        # pytest calls `repr_failure` for the call alone, and that calls this.
        error = excinfo.value
        return self._failure_repr(error) if isinstance(error, RankFailure) else super()._repr_failure_py(excinfo, style)

    def _failure_repr(self, error: RankFailure) -> ExceptionChainRepr:
        """Return the report's text, in a form that keeps its first line separate for the short summary, also through xdist."""
        path, line = self._find_place(error.verdict.where)
        place = ReprFileLocation(path, line, terminal.brief(error.verdict, self.path))
        entry = ReprEntryNative([error.report + "\n"])
        return ExceptionChainRepr([(ReprTraceback([entry], None, style="native"), place, None)])

    def _find_place(self, where: str) -> tuple[str, int]:
        """Return file and line for tools (annotations, editors): those of ``where`` in the repository, else the test's."""
        match = LOCATION.match(where)
        if match is not None:
            path = self.config.rootpath / match["file"]
            if path.is_file() and path.is_relative_to(self.config.rootpath) and "site-packages" not in path.parts:
                return str(path), int(match["line"])
        return marks.find_place(self)


class RankedTestCase(Ranked, TestCaseFunction):
    """A method of a unittest.TestCase: setUp, tearDown, setUpClass and clean-ups run in each rank."""


# Its items run coroutines by `setup` and `runtest`, which a rank calls as any process does.
_PYTEST_ASYNCIO = "pytest_asyncio.plugin"


def may_be_ranked(item: pytest.Item) -> bool:
    """Return whether `make_ranked` knows the kind of a collected test."""
    return type(item) in (pytest.Function, TestCaseFunction) or type(item).__module__ == _PYTEST_ASYNCIO


@functools.cache
def _ranked(kind: type[pytest.Function]) -> type[Ranked]:
    """Return the class of the ranked form of items of a class."""
    return type(f"Ranked{kind.__name__}", (Ranked, kind), {})


def make_ranked(item: pytest.Function) -> Ranked:
    """Return the ranked form of a collected function, coroutine or method of a TestCase, marks and parameters kept."""
    if isinstance(item, TestCaseFunction):
        case = RankedTestCase.from_parent(item.parent, name=item.name, callobj=item.obj)
        case.own_markers, case.keywords = item.own_markers, item.keywords
        return case
    ranked: Ranked = _ranked(type(item)).from_parent(
        item.parent,
        name=item.name,
        callspec=getattr(item, "callspec", None),
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,
        keywords=item.keywords,
        originalname=item.originalname,
    )
    ranked.own_markers = item.own_markers
    return ranked
