"""Lines that change parameters or gradients beside an optimizer, found in the source of the functions that run."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from nsa.trace.divergence.changes import changes_around

PROGRAM = """
    def run(seen, model, rank):
        for step in range(1):
            {body}
            seen(model)

    class Average:
        def stand_in(self, model):
            for mean, value in zip(self.means, model.parameters()):
                value.copy_(mean)

        def follow(self, model):
            for name, value in model.named_parameters():
                self.means[name].lerp_(value, 0.1)

    def deeper(average, model):
        average.stand_in(model)
"""


def found(tmp_path: Path, body: str) -> list[list[str]]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).replace("{body}", textwrap.indent(body, " " * 8).lstrip()))
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    changes: list[list[str]] = []
    program.run(lambda model: changes.extend(changes_around(frozenset({"level", "weight"}))), None, 0)
    return [[part.removeprefix(f"{path}:") for part in change] for change in changes if "program.py" in change[1]]


@pytest.mark.parametrize(
    ("body", "of", "place", "condition"),
    [
        ("if rank == 9: model.weight.data.mul_(2)", "parameter", "4 in run", "4 in run"),
        ("if rank == 9: model.layers[0].weight[3] = 0", "parameter", "4 in run", "4 in run"),
        ("if rank == 9: model.level.add_(1)", "parameter", "4 in run", "4 in run"),
        ("if rank == 9: torch.nn.init.zeros_(model.weight)", "parameter", "4 in run", "4 in run"),
        ("if rank == 9: clip_grad_norm_(model.parameters(), 1)", "gradient", "4 in run", "4 in run"),
        ("if rank == 9: model.weight.grad = None", "gradient", "4 in run", "4 in run"),
        ("for p in [] if not model else model.parameters():\n    p.grad *= 2", "gradient", "5 in run", ""),
        ("while rank == 9: model.weight.mul_(2)", "parameter", "4 in run", ""),
    ],
)
def test_a_change_in_the_loop(tmp_path: Path, body: str, of: str, place: str, condition: str) -> None:
    assert found(tmp_path, body) == [[of, place, place, condition, "rank" if condition else ""]]


def test_a_change_in_what_a_condition_calls(tmp_path: Path) -> None:
    assert found(tmp_path, "if rank == 9:\n    deeper(average, model)") == [
        ["parameter", "11 in stand_in", "5 in run", "4 in run", "rank"]
    ]


@pytest.mark.parametrize(
    "body",
    [
        "losses = losses if rank else []",
        "model and average.follow(model)",
        "total = 0; total += 1",
        "model and model.level.requires_grad_(True)",
    ],
)
def test_what_changes_no_parameter(tmp_path: Path, body: str) -> None:
    assert found(tmp_path, body) == []
