"""Job files and CI recipes of the pages are what their readers take them for; the verdict's schema is what verdicts are."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pytest_nsa.diagnosis.verdict import Fact, Verdict

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
schema = __import__("schema")


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize(("number", "kind"), [(0, "github-workflows"), (1, "gitlab-ci")])
def test_a_recipe_follows_its_service_s_schema(tmp_path: Path, number: int, kind: str) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(fenced("ci.md", "yaml")[number], encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", str(path)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_conda_recipe_is_of_this_version_and_has_its_requirements() -> None:
    recipe = yaml.safe_load((ROOT / ".ci" / "recipe.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert recipe["context"]["version"] == project["version"]
    needed = {f"python {project['requires-python']}", *(word.replace(">=", " >=") for word in project["dependencies"])}
    assert set(recipe["requirements"]["run"]) == needed


def test_both_pods_of_the_kubernetes_job_find_each_other() -> None:
    service, job = list(yaml.safe_load_all(fenced("clusters.md", "yaml")[0]))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = spec["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert f"--nnodes={spec['completions']} " in script
    assert f"--master_addr={name}-0.{name}" in script
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert f"--nproc_per_node={container['resources']['limits']['nvidia.com/gpu']} " in script


def test_scripts_of_pages_pass_shellcheck(tmp_path: Path) -> None:
    checker = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert checker is not None, "pip install -e '.[test]' brings it"
    scripts = fenced("clusters.md", "bash")
    assert len(scripts) == 2
    for number, script in enumerate(scripts):
        path = tmp_path / f"{number}.sh"
        path.write_text(script, encoding="utf-8")
        # SC2154: variables that SLURM sets, or that the page tells to set; SC2086: NODES is a list of words.
        done = subprocess.run(
            [checker, "-s", "bash", "-e", "SC2154,SC2086", str(path)], text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_the_schema_of_verdicts_is_made_from_the_code() -> None:
    assert schema.FILE.read_text(encoding="utf-8") == schema.text(), "run python docs/schema.py, which writes it again"


def test_verdicts_follow_it() -> None:
    checker: Any = jsonschema.Draft202012Validator(schema.schema())
    checker.check_schema(schema.schema())
    fact = Fact(rank=1, kind="board", file="rank1/board.bin", text="waits")
    verdict = Verdict(nodeid="a", outcome="HANG", cause="sleeping", ranks=(1,), evidence=(fact,), retry="never")
    data = json.loads(json.dumps(verdict.to_json()))
    checker.validate(data)
    for wrong in (
        {"outcome": "STUCK"},
        {"ranks": ["one"]},
        {"confidence": 2},
        {"evidence": [{"rank": 1}]},
        {"schema": 9},
    ):
        assert not checker.is_valid({**data, **wrong}), wrong
