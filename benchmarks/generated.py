"""Generated programs with one fault each, which no rule was written for: how often the verdict names cause, ranks and line.

    python benchmarks/generated.py --seed 20 --programs 60 --json benchmarks/results/generated.json

A program is one of the patterns of `programs.py`, on 2 to 7 ranks. In one round one rank makes a statement otherwise, or it makes a
round more or less: `EDITS`. A program in which that rank does not come to the statement, or no rank needs it, passes: it is not
counted. `--record NAME` keeps the evidence with its labels in tests_cpu/faults/evidence/generated, to which `fit.py` fits.
"""

import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import keep, parser_of, run_tests
from programs import HEAD, drawn

from tests_cpu.faults.recorded import GENERATED, folders_of, pack

HERE = "# HERE"  # ends the lines that a verdict may name
LACKS = {
    "collective": ("skipped_collective",),
    "message": ("p2p_unmatched",),
    "key": ("io_stuck", "missing_collective", "skipped_collective"),
}
HAS = {"collective": ("extra_collective",), "message": ("p2p_unmatched",)}
DIFFERS = {"collective": ("collective_mismatch", "group_order_deadlock"), "message": ("p2p_unmatched",)}
STALLS = ("skipped_collective", "p2p_unmatched", "io_stuck", "missing_collective")
OTHERWISE = f"if ODD:\n    {{other}}  {HERE}\nelse:\n    {{it}}  {HERE}"


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines in place of a statement ``{it}``, with ``{other}`` for what the odd rank makes, and the right causes by kind of
    statement. ``share``: how often it is drawn.
    """

    lines: str
    causes: dict[str, tuple[str, ...]]
    share: int = 1


EDITS = {
    "left out": Edit(f"if not ODD:\n    {{it}}  {HERE}", LACKS, share=4),
    "once more": Edit(f"{{it}}  {HERE}\nif ODD:\n    {{it}}  {HERE}", HAS, share=3),
    "returned": Edit(f"if ODD:\n    return  {HERE}\n{{it}}  {HERE}", dict.fromkeys(LACKS, STALLS)),
    "raised": Edit(
        f"if ODD:\n    raise ValueError('a bad batch')  {HERE}\n{{it}}", dict.fromkeys(LACKS, ("rank_exception",))
    ),
    "swallowed": Edit(
        f"try:\n    if ODD:\n        raise ValueError('a bad batch')  {HERE}\n    {{it}}  {HERE}\nexcept ValueError:\n    pass",
        LACKS,
    ),
    "peer": Edit(OTHERWISE, {"message": ("p2p_unmatched",)}),
    "tag": Edit(OTHERWISE, {"message": ("p2p_unmatched",)}),
    "name": Edit(OTHERWISE, {"key": ("io_stuck", "missing_collective")}),
    "operation": Edit(OTHERWISE, {"collective": ("collective_mismatch",)}),
    "order": Edit("{it}", DIFFERS, share=2),
    "a round less": Edit("{it}", LACKS),
    "a round more": Edit("{it}", HAS),
}
_PEER = re.compile(r"(?<=, )(?P<peer>[^,]+?)(?=(, tag=\w+)?\)+$)")
_ROUNDS = re.compile(r"( +)for step in range\((\d)\):")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A generated test: its text, the kind of its fault, and what its verdict must name."""

    name: str
    text: str
    kind: str
    causes: tuple[str, ...]
    ranks: list[int]


def program(number: int, draw: random.Random) -> Program:
    """Return a program in which one rank does otherwise in one round."""
    while True:
        pattern, sizes, source = drawn(draw)
        n, lines = draw.choice(sizes), source.rstrip("\n").split("\n")
        culprit = draw.randrange(n)
        at = draw.choice([i for i, line in enumerate(lines) if "#~ " in line])
        edit = draw.choices(list(EDITS), [e.share for e in EDITS.values()])[0]
        # Of two ranks that differ in their first round, nothing may tell which one is right.
        step = draw.randint(0 if edit == "left out" and n > 2 else 1, 3)
        what = lines[at].partition("#~ ")[2]
        edited = _edited(lines, at, edit, draw.randrange(n) if n > 2 else -1)
        if edited is not None and what in EDITS[edit].causes:
            break
    kinds = {what} if "round" not in edit else {line.partition("#~ ")[2] for line in lines} - {"", "key"}
    causes = dict.fromkeys(cause for kind in sorted(kinds) for cause in EDITS[edit].causes[kind])
    odd = "is_odd(step)" if draw.random() < 0.7 else f"(dist.get_rank(), step) == ({culprit}, {step})"
    name = f"test_{number:03d}"
    mark = f"@pytest.mark.world_size({n})\ndef {name}(group):\n    ODD.add(({culprit}, {-1 if edit == 'a round more' else step}))"
    text = "\n".join(line.partition("  #~")[0].replace("ODD:", f"{odd}:") for line in edited) + "\n"
    return Program(
        name=name, text=text.replace("def TEST(group):", mark), kind=f"{pattern}, {what} {edit}", causes=tuple(causes),
        ranks=[culprit],
    )  # fmt: skip


def _edited(lines: list[str], at: int, edit: str, peer: int) -> list[str] | None:
    """Return the lines of a program with an edit of line ``at``; None where it cannot be made there."""
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    it, _, what = (part.strip() for part in lines[at].partition("#~"))
    if "round" in edit:
        return _with_rounds(lines, edit)
    other: str | None = ""
    if edit == "order":
        following = lines[at + 1] if at + 1 < len(lines) else ""
        after = following.strip().partition("  #~")
        if after[2].strip() != what or not following.startswith(f"{indent}{after[0]}") or after[0] == it:
            return None
        edited = f"if ODD:\n    {after[0]}  {HERE}\n    {it}\nelse:\n    {it}  {HERE}\n    {after[0]}"
        return [*lines[:at], *(indent + line for line in edited.split("\n")), *lines[at + 2 :]]
    if "{other}" in EDITS[edit].lines:
        other = _other(edit, it, peer)
        if other in (None, it):
            return None
    edited = EDITS[edit].lines.format(it=it, other=other)
    return [*lines[:at], *(indent + line for line in edited.split("\n")), *lines[at + 1 :]]


def _with_rounds(lines: list[str], edit: str) -> list[str] | None:
    """Return the lines of a program in which the odd rank leaves the loop of the test, or makes a round more."""
    at = next((i for i, line in enumerate(lines) if _ROUNDS.fullmatch(line)), None)
    if at is None or any(line.endswith(" key") for line in lines):
        return None
    marked = [re.sub("  #~.*", f"  {HERE}", line) for line in lines]
    indent, number = _ROUNDS.fullmatch(lines[at]).groups()  # type: ignore[union-attr]
    if edit == "a round more":
        return [*marked[:at], f"{indent}for step in range({number} + is_odd(-1)):", *marked[at + 1 :]]
    return [*marked[: at + 1], f"{indent}    if ODD:", f"{indent}        break  {HERE}", *marked[at + 1 :]]


def _other(edit: str, it: str, peer: int) -> str | None:
    """Return what the odd rank makes in place of a statement; None where there is no such."""
    if edit == "tag":
        return re.sub(r"tag=(\w+)", r"tag=\1 + 50", it)
    if edit == "name":
        return it.replace("{step}", "{step + 50}")
    if edit == "operation":
        return (
            None if "=" in it or "append" in it else "dist.barrier()" if "barrier" not in it else "mean(torch.ones(2))"
        )
    if peer < 0 or _PEER.search(it) is None or "wap(" in it:
        return None
    ranks = f"next(p for p in range({peer}, {peer} + 8) if p % WORLD not in (dist.get_rank(), \\g<peer>)) % WORLD"
    return _PEER.sub(ranks.replace("WORLD", "dist.get_world_size()"), it, count=1)


def run(programs: list[Program], folder: Path, workers: int, record: str = "") -> dict[str, Any]:
    """Run the programs, each in its file below `HEAD`; return how many verdicts are right, by kind of fault.

    ``record``: the archive in which the evidence of those that do not pass is kept.
    """
    for p in programs:
        (folder / f"{p.name}.py").write_text(HEAD + p.text)
    options = ("-o", "ranks_hang_after=2.5", "-o", "ranks_timeout=16", "--ranks-rerun", "off")  # the model alone
    found = run_tests(folder, *options, workers=workers)
    verdicts = {nodeid.rpartition("::")[2]: verdict for nodeid, verdict in found.items()}
    counted = [p for p in programs if verdicts[p.name].get("cause")]
    if record:
        keep_evidence(record, counted, folder)
    right, by_kind, wrong = Counter[str](), Counter[str](), []
    for p in counted:
        verdict = verdicts[p.name]
        marked = {i for i, line in enumerate((HEAD + p.text).split("\n"), 1) if line.endswith(HERE)}
        told = {int(n) for text in (verdict["where"], verdict["called_from"]) for n in re.findall(r":(\d+) in ", text)}
        is_cause, is_ranks = verdict["cause"] in p.causes, verdict["ranks"] == p.ranks
        right.update(
            {
                "cause": is_cause,
                "ranks": is_ranks,
                "cause and ranks": is_cause and is_ranks,
                "line": bool(told & marked),
                "wrong and certain": verdict["certain"] and not (is_cause and is_ranks),
            }
        )
        by_kind[f"{p.kind} -> {verdict['cause']}"] += 1
        if not (is_cause and is_ranks):
            wrong.append(
                {
                    "kind": p.kind,
                    "ranks": p.ranks,
                    "certain": verdict["certain"],
                    "test": p.text,
                    "told": verdict["reason"],
                }
            )
    return {
        "programs": len(programs), "with_a_fault": len(counted), "right": dict(right), "by_kind": dict(sorted(by_kind.items())),
        "wrong": wrong,
    }  # fmt: skip


def keep_evidence(name: str, programs: list[Program], folder: Path) -> None:
    """Pack the evidence of programs that ran below ``folder``, with their labels."""
    found = folders_of(folder / "artifacts" / "latest")
    labels = {p.name: {"causes": p.causes, "ranks": p.ranks} for p in programs}
    pack(GENERATED / f"{name}.tar.xz", {p.name: found[p.name] for p in programs}, folder, labels)


def main() -> None:
    """Read the command line, generate, run, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--workers", type=int, default=3, help="tests at a time (default: 3)")
    parser.add_argument("--record", default="", metavar="NAME", help="keep the evidence, to fit the weights to")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    programs = [program(k, draw) for k in range(arguments.programs)]
    with tempfile.TemporaryDirectory() as folder:
        figures = run(programs, Path(folder), arguments.workers, arguments.record)
    keep({"seed": arguments.seed, **figures}, arguments.json)


if __name__ == "__main__":
    main()
