"""The model that explains why ranks are in different calls: rhythm, terms, candidates, and the table of weights that is shipped."""

import json
import lzma
import random
import re
import tarfile
from pathlib import Path

import pytest

from pytest_nsa.diagnosis import verdict
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.explain import choose, keys, terms
from pytest_nsa.diagnosis.explain.edits import Edit, candidates
from pytest_nsa.diagnosis.explain.message_terms import MESSAGE
from pytest_nsa.diagnosis.explain.rhythm import surprise
from pytest_nsa.diagnosis.facts import rings
from pytest_nsa.diagnosis.rules.messages import held_in_messages
from pytest_nsa.evidence.collectives import first_departure
from pytest_nsa.evidence.load import load
from tests_cpu.faults.recorded import GENERATED, unpack


def test_what_rounds_lead_to_surprises_least() -> None:
    rounds = list("abcabcab")
    costs = {call: surprise(rounds, call) for call in "abcx"}
    assert costs["c"] <= 1 < costs["a"] <= costs["b"] < costs["x"]


def test_a_longer_context_decides_between_two_followers() -> None:
    """After 'a', 'b' and 'c' follow as often; what came before 'a' tells which."""
    rounds = list("xabyacxabyacxa")
    assert surprise(rounds, "b") <= 1 < surprise(rounds, "c")


def test_a_surprise_depends_on_the_latest_calls_alone() -> None:
    draw = random.Random(7)
    old, rounds = [draw.choice("pqrs") for _ in range(500)], list("abc") * 40
    assert surprise(old + rounds, "a") == surprise(rounds, "a")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return unpack("trainer_callbacks", tmp_path_factory.mktemp("trainer_callbacks"))


def test_the_explanation_is_in_the_verdict(recorded: dict[str, Path]) -> None:
    verdict = diagnose(load(recorded["test_one_batch_less_in_an_epoch"]))
    assert verdict.rule == "calls.departed"
    assert verdict.terms
    assert next(iter(verdict.terms)) in verdict.explanation
    assert all(weight > 0 for weight in verdict.terms.values())
    assert json.loads(json.dumps(verdict.to_json()))["terms"] == verdict.terms


def test_a_side_s_facts_are_the_other_s_turned_round(recorded: dict[str, Path]) -> None:
    evidence = load(recorded["test_one_batch_less_in_an_epoch"])
    entered = first_departure(rings(evidence))
    assert entered is not None
    one, other = (c.values for c in candidates(evidence, entered) if c.edit is Edit.SKIP)
    sides = {name.replace("they: ", "others: "): value for name, value in one.items() if name.startswith("they: ")}
    assert sides == {name: value for name, value in other.items() if name.startswith("others: ")}
    assert ("ahead, counted" in one) == ("behind, counted" in other)


def test_a_term_of_a_message_is_about_the_rank_that_waits_or_the_one_that_is_waited_for(tmp_path: Path) -> None:
    """Rank 0 of two pairs receives from rank 2 in place of rank 1, which waits in its send."""
    folder = _unpacked("exchanges_661", tmp_path) / "test_023"
    evidence = load(folder)
    entered = held_in_messages(evidence)
    assert entered is not None
    found = candidates(evidence, entered)
    wrong = next(c for c in found if c.edit is Edit.MISDIRECTED and c.ranks == (0,))
    assert wrong.values["waiter: waited for"] == 1
    assert (wrong.about("waiter: waited for"), wrong.about("peer: made its half")) == ((0,), (2,))
    lacks = next(c for c in found if c.edit is Edit.UNANSWERED and c.ranks == (2,))
    assert (lacks.about("waiter: waited for"), lacks.about("others: selected")) == ((0,), (0,))
    verdict = diagnose(evidence)
    assert (verdict.cause, verdict.ranks) == ("p2p_unmatched", (0,))
    assert any(text.startswith("rank 0 ") for text in verdict.terms)


@pytest.mark.slow
@pytest.mark.parametrize("archive", sorted(path.name.partition(".")[0] for path in GENERATED.glob("*.tar.xz")))
def test_the_table_explains_what_it_was_fitted_to(archive: str, tmp_path: Path) -> None:
    folder = _unpacked(archive, tmp_path)
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    verdicts = {name: diagnose(load(folder / name)) for name in labels}
    wrong = [
        verdict
        for name, verdict in verdicts.items()
        if verdict.cause not in labels[name]["causes"] or sorted(verdict.ranks) != sorted(labels[name]["ranks"])
    ]
    assert len(wrong) <= 0.15 * len(labels)
    assert sum(verdict.certain for verdict in wrong) <= 0.02 * len(labels)


def _unpacked(archive: str, folder: Path) -> Path:
    with tarfile.open(GENERATED / f"{archive}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder


def test_the_weights_have_the_terms_and_no_other() -> None:
    named = {t.name for t in terms.SHARED} | {f"{side}: {t.name}" for t in terms.OWN for side in ("they", "others")}
    named |= {f"{'waiter' if t.is_of_waiter else 'peer'}: {t.name}" for t in MESSAGE}
    named |= {f"{'asker' if t.is_of_waiter else 'setter'}: {t.name}" for t in keys.TERMS}
    named |= {*terms.size_values(1, 1), "always", "others there"}
    assert set().union(*choose.weights().values()) == named
    assert len({t.name for t in (*terms.OWN, *terms.SHARED)}) == len(terms.OWN) + len(terms.SHARED)


def test_a_fit_finds_the_edit_that_a_term_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of faults in which one term is true of the right edit alone, the fitted table chooses by that term."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    import fit

    draw = random.Random(3)
    made = []
    for _ in range(40):
        right, noise = draw.randrange(2), [float(draw.random() < 0.5) for _ in range(2)]
        values = tuple({"tells": float(i == right), "noise": noise[i]} for i in range(2))
        made.append(fit.Row("drawn", ("skip", "skip"), values, frozenset({right}), 1.0))
    column = fit.fitted(made)["skip"]
    assert column["tells"] > 2 * abs(column.get("noise", 0.0))


def test_recorded_programs_name_no_path_of_the_machine_that_ran_them() -> None:
    archives = sorted(GENERATED.glob("*.tar.xz"))
    assert archives
    for archive in archives:
        data = lzma.decompress(archive.read_bytes())
        assert not set(re.findall(rb"/(?:home|root|tmp|work|opt)/[a-z.]+", data)), archive.name


@pytest.mark.slow
def test_the_table_that_is_shipped_is_the_fit_to_the_recorded_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    import fit

    again, shipped = fit.fitted(fit.rows(fit.programs(tmp_path))), choose.weights()
    assert set(again) == set(shipped)
    for kind, column in shipped.items():
        for name, weight in column.items():
            assert again[kind].get(name, 0.0) == pytest.approx(weight, abs=0.1), (kind, name)


@pytest.mark.parametrize(
    ("ranks", "text", "stated"),
    [
        ((1,), "makes its latest call again", "rank 1 makes its latest call again"),
        ((1, 2), "makes its latest call again", "ranks 1 and 2 make their latest call again"),
        ((0, 1), "carries what the others carry", "ranks 0 and 1 carry what the others carry"),
        ((0, 1), "tries to meet other ranks", "ranks 0 and 1 try to meet other ranks"),
        ((0, 1), "has no earlier rounds", "ranks 0 and 1 have no earlier rounds"),
        ((0, 1), "in barrier #1", "ranks 0 and 1 in barrier #1"),
    ],
)
def test_a_statement_about_several_ranks_is_in_the_plural(ranks: tuple[int, ...], text: str, stated: str) -> None:
    assert verdict.stated(ranks, text, 4) == stated


@pytest.mark.parametrize(
    ("text", "of_two"),
    [
        ("never made the others' call", "rank 1 never made rank 0's call"),
        (
            "has earlier rounds in which its call follows the others'",
            "rank 1 has earlier rounds in which its call follows rank 0's",
        ),
        ("carries what the others carry", "rank 1 carries what rank 0 carries"),
        ("makes no call, as the others do", "rank 1 makes no call, as rank 0 does"),
        ("left the loop that the others are in", "rank 1 left the loop that rank 0 is in"),
        ("went on; the others waited for it", "rank 1 went on; rank 0 waited for it"),
    ],
)
def test_a_statement_about_one_of_two_ranks_names_the_other(text: str, of_two: str) -> None:
    assert verdict.stated((1,), text, 2) == of_two
    assert verdict.stated((1,), text, 3) == f"rank 1 {text}"
