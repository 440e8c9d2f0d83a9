"""Keys of a store: the rank of a number in a key, and the round of the key."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.explain.keys import Keys
from pytest_nsa.diagnosis.explain.messages import KEY, ended
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import KeyUse
from tests_cpu.diagnosis.test_evidence import make_folder


def keys_of(path: Path, sets: Mapping[int, list[str]], waits: Mapping[int, str]) -> Keys:
    """Return the keys of ranks that have set ``sets`` at one line and wait for ``waits``; a rank without a wait has ended."""
    evidence = load(make_folder(path / "t", len({*sets, *waits})))
    ranks = tuple(
        replace(r, keys_set=tuple(KeyUse(key, "a.py:1 in f") for key in sets.get(r.rank, ()))) for r in evidence.ranks
    )
    calls = {r.rank: ended(r) for r in ranks}
    calls |= {rank: replace(calls[rank], op=KEY, note=key) for rank, key in waits.items()}
    return Keys(replace(evidence, ranks=ranks), calls)


@pytest.mark.parametrize(
    ("sets", "key", "owners", "round_"),
    [
        ({0: ["at/0/0", "at/3/0"], 1: ["at/0/1", "at/2/1"], 2: ["at/3/2"]}, "at/3/1", {1}, (3,)),
        ({0: ["at/0/0", "at/3/0"], 1: [], 2: []}, "at/3/2", {2}, (3,)),  # its own number, in every round
        ({0: ["plan/0"], 1: []}, "plan/1", set(), (1,)),  # the number may be the round's
        ({0: ["plan/0", "plan/4"], 1: []}, "plan/5", set(), (5,)),
        ({0: ["of/10/1", "of/10/2"], 1: ["of/20/1"], 2: []}, "of/20/2", {1}, (2,)),  # another number, but one for each
        ({0: [], 1: []}, "plan/1", set(), (1,)),
    ],
)
def test_the_owner_and_the_round_of_a_key(
    tmp_path: Path, sets: dict[int, list[str]], key: str, owners: set[int], round_: tuple[int, ...]
) -> None:
    keys = keys_of(tmp_path, sets, {})
    assert (keys.owners([key]), keys.find_round(key)) == (owners, round_)


def test_of_two_numbers_the_one_that_differs_in_a_wait_is_the_rank_s(tmp_path: Path) -> None:
    sets = {0: ["at/0/0"], 1: ["at/1/1"], 2: []}  # each rank's round is its own number, too
    assert keys_of(tmp_path, sets, {}).owners(["at/0/1", "at/0/2"]) == {1, 2}


def test_a_key_that_ranks_count_in_is_wanted_though_it_is_set(tmp_path: Path) -> None:
    keys = keys_of(
        tmp_path, {0: ["done/1"], 1: ["done/0"], 2: ["done/1"]}, {0: "done/1", 1: "done/1", 2: "done/1, go/1, …"}
    )
    assert keys.wanted(0) == ("done/1",)
    assert keys.wanted(2) == ("go/1",)
