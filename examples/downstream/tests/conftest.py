"""Every hook of pytest-nsa once, as a repository would use them; none is needed."""

import os

import pytest

from pytest_nsa.diagnosis.causes import Cause
from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.diagnosis.verdict import Fact, Finding

LICENCE_LOST = Cause(
    name="licence_lost",
    chapter="Ours",
    summary="the licence server took the seat back.",
    advice="free a seat and run it again",
    retry="once",
)


def licence_lost(evidence):
    """Name each rank for which our evidence source reported a lost licence, whatever its stack shows."""
    told = [fact for fact in evidence.external if fact.kind == "licence"]
    if not told:
        return None
    ranks = tuple(sorted({fact.rank for fact in told}))
    return Finding(cause="licence_lost", ranks=ranks, reason=told[0].text, confidence=0.9)


@pytest.hookimpl(optionalhook=True)  # unknown, and no error, under -p no:nsa
def pytest_nsa_causes(config):
    return [(LICENCE_LOST, licence_lost)]


@pytest.hookimpl(optionalhook=True)
def pytest_nsa_collect_evidence(folder, pids):
    """Ask the licence server; in this example, check whether a rank left a note in the test's folder."""
    for rank in pids:
        note = folder / f"licence{rank}.txt"
        if note.exists():
            yield Fact(rank=rank, kind="licence", file=note.name, text=note.read_text().strip())


@pytest.hookimpl(optionalhook=True)
def pytest_nsa_scenarios(config):
    return {"one_step": "the model itself", "licence": "the licence server", "soak": "memory"}


@pytest.hookimpl(optionalhook=True)
def pytest_nsa_decide(verdicts):
    if not verdicts.get("licence") or not verdicts["licence"].failed:
        return None  # the plugin's sentence is used
    return Decision(
        sentence="The licence server failed, so nothing is known of the model.", action="ask its owner", path=()
    )


@pytest.hookimpl(optionalhook=True)
def pytest_nsa_environment(config, rank, world_size):
    return {"SMALL_TRANSFORMER_CACHE": f"{os.environ.get('TMPDIR', '/tmp')}/cache-of-rank-{rank}"}


@pytest.hookimpl(optionalhook=True)
def pytest_nsa_wrap_model(config, model, parallel, device, options):
    """Use a model's own `parallelize` where it has one."""
    own = getattr(model, "parallelize", None)
    return own(parallel, device) if own is not None else None
