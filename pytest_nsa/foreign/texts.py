"""Read what other analyzers print: torch's flight recorder analyzer, and NCCL's RAS service as text."""

import re
from collections.abc import Iterator

from pytest_nsa.foreign.values import Statement

_MISSING = re.compile(r"missing ranks: \{(?P<ranks>[\d, ]+)\}|Missing ranks are \{?(?P<others>[\d, ]+)\}?")
_CULPRITS = re.compile(r"Culprit rank (?P<rank>\d+); (?P<what>[^,\n]+)")
_COLLECTIVE = re.compile(r"collective: (?P<name>\S+)")
_FRAME = re.compile(r"(?P<function>\S+) at (?P<file>[^\s:]+\.py):(?P<line>\d+)")
_WORLD = re.compile(r"(?:world size: |\()(\d{1,5})(?: ranks\))?")
_LAUNCHED = re.compile(r"(?P<many>\d+) ranks? (?:has|have) launched up to operation (?P<number>\d+)")
_OF_RANK = re.compile(r"^\s+Rank (?P<rank>\d+) ")


def is_analysis(text: str) -> bool:
    """Return whether a text is one of the two."""
    return bool(_MISSING.search(text) or _CULPRITS.search(text) or _LAUNCHED.search(text))


def find_world_size(text: str) -> int:
    """Return the number of ranks that an analyzer's text names; 0 where it names none."""
    return max((int(found[1]) for found in _WORLD.finditer(text)), default=0)


def read_analysis(text: str) -> Iterator[Statement]:
    """Yield what an analyzer's text states of ranks."""
    name = _COLLECTIVE.search(text)
    called = f" in {name['name']}" if name else ""
    at = next((f for f in _FRAME.finditer(text) if "/torch/" not in f["file"]), None)
    where = f"{at['file']}:{at['line']} in {at['function']}" if at else ""
    culprits: dict[str, set[int]] = {}
    for found in _CULPRITS.finditer(text):
        culprits.setdefault(found["what"].strip(), set()).add(int(found["rank"]))
    for what, ranks in culprits.items():
        yield Statement("mismatch", tuple(sorted(ranks)), f"{what}{called}", where)
    for found in _MISSING.finditer(text):
        missing = tuple(sorted({int(n) for n in re.findall(r"\d+", found["ranks"] or found["others"])}))
        yield Statement("missing", missing, f"not{called}, in which the others wait", where)
    yield from _behind(text)


def _behind(text: str) -> Iterator[Statement]:
    """Yield the ranks of a communicator that have launched another number of operations than most."""
    parts = list(_LAUNCHED.finditer(text))
    if len(parts) < 2:
        return
    usual = max(parts, key=lambda found: int(found["many"]))
    ends = [*(found.start() for found in parts[1:]), len(text)]
    for found, end in zip(parts, ends, strict=True):
        if found is usual or found["number"] == usual["number"]:
            continue
        ranks = tuple(int(m["rank"]) for line in text[found.end() : end].splitlines() if (m := _OF_RANK.match(line)))
        relation = "behind" if int(found["number"]) < int(usual["number"]) else "ahead"
        stated = f"launched up to operation {found['number']}, {relation} of the others' {usual['number']}"
        yield Statement("behind", ranks[: int(found["many"])], stated)
