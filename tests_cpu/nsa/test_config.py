"""Every wrong setting is one line that names the value and the right form."""

import contextlib
import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from nsa import build_model
from nsa.config import ConfigError, load_config
from nsa.model.attention import Rotary
from nsa.model.transformer import RMSNorm
from nsa.sections import SECTIONS
from nsa.train import launched_ranks, main

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"


@pytest.mark.parametrize("words", ["1 true yes ON", "0 False no off"])
def test_switches_take_the_words_of_other_programs(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    for word in words.split():
        monkeypatch.setenv("NSA_DDP_STATIC_GRAPH", word)
        assert load_config(TINY).parallel.static_graph is words.startswith("1")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NSA_GC_RANGE", "6:3", "NSA_GC_RANGE='6:3': the range must go up, as in '0:6'"),
        ("NSA_GC_RANGE", "0:60", "gc_range('0:60'): the model has 12 layers"),
        ("NSA_GC_RANGE", "a:b", "NSA_GC_RANGE='a:b': must be start:end in whole layers, as in '0:6'"),
        ("NSA_GC_RANGE", "3", "NSA_GC_RANGE='3': must be start:end"),
        ("NSA_FORCE_BRANCH", "foo", "NSA_FORCE_BRANCH='foo': must be one of cmp, sel, win"),
        ("NSA_TRACE_GRADS", "perhaps", "NSA_TRACE_GRADS='perhaps': must be 0 or 1 (or true, yes, on; false, no, off)"),
        ("NSA_MEM_DUMP_EVERY", "x", "NSA_MEM_DUMP_EVERY='x': must be a whole number"),
        ("NSA_MEM_DUMP_EVERY", "-1", "NSA_MEM_DUMP_EVERY='-1': must be 0 or more"),
        ("TORCH_BACKEND", "mpi", "TORCH_BACKEND='mpi': must be one of auto, nccl, gloo"),
        ("NSA_USE_FA2", "2", "NSA_USE_FA2='2': must be 0 or 1"),
        ("NSA_USE_FA2", "1", "NSA_USE_FA2='1': flash-attn is not installed; install it, or set NSA_USE_FA2=0"),
        ("NSA_GC_RANGE", "²:³", "NSA_GC_RANGE='²:³': must be start:end"),
    ],
)
def test_bad_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as error:
        load_config(TINY)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_flash_attn_is_forbidden_where_the_file_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "flash.yaml"
    path.write_text("model:\n  backend: flash\n")
    monkeypatch.setenv("NSA_USE_FA2", "0")
    assert load_config(path).model.backend == "auto"
    monkeypatch.delenv("NSA_USE_FA2")
    assert load_config(path).model.backend == "flash"


def test_variables_reach_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NSA_GC_RANGE": "0:6", "NSA_FORCE_BRANCH": "sel", "NSA_DDP_STATIC_GRAPH": "1"}.items():
        monkeypatch.setenv(name, value)
    config = load_config(TINY, gradient_checkpointing=False)
    assert (config.train.gc_range, config.model.force_branch, config.parallel.static_graph) == ((0, 6), "sel", True)
    assert config.train.gradient_checkpointing is False  # an override is stronger than the environment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  layers: 3\n", "unknown key model.layers; did you mean 'n_layers'?"),
        ("modle:\n  dim: 3\n", "unknown section 'modle'; did you mean 'model'?"),
        ("model:\n  dim: wide\n", "model.dim: must be a whole number, got 'wide'"),
        ("model:\n  n_heads: 5\n", "model.n_heads=5: must be a multiple of n_kv_heads=2"),
        ("model:\n  compress_block: 20\n", "model.compress_block=20: must be a multiple of compress_stride=16"),
        ("train:\n  seq_len: 16\n", "train.seq_len=16: shorter than one compression block (model.compress_block=32)"),
        ("train:\n  steps: 0\n", "train.steps: must be at least 1, got '0'"),
        ("train:\n  lr: 1\n  lr: 2\n", "the key 'lr' is there twice"),
        ("train: {}\ntrain:\n  lr: 1\n", "the key 'train' is there twice"),
        ("train:\n  lr: -1\n", "train.lr: must be more than 0"),
        ("train:\n  lr: 1e-5\n", "train.min_lr=3e-05: must not exceed train.lr=1e-05"),
        ("train:\n  lr: inf\n", "train.lr: must be a finite number, got 'inf'"),
        (f"train:\n  dtype: {'x' * 400}\n", f"train.dtype: must be one of bf16, fp32, got '{'x' * 76}..."),
        ("train:\n  seed: -1\n", "train.seed: must be 0 or more, got '-1'"),
        ("train:\n  watchdog_s: 1e10\n", "train.watchdog_s: must be at most 1e+09"),
        ("data:\n  path: ''\n", "data.path: must be text, and not empty, got ''"),
        ("train: [1]\n", "section 'train' must hold key: value pairs"),
        ("- a\n", "must hold sections"),
        ("model: {dim: [\n", "not valid YAML"),
        (f"model: {'[' * 3000}", "nested too deeply"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("rank", "world_size"), [("3", "1"), ("-1", "2"), ("0", "0")])
def test_a_rank_that_the_world_does_not_have(monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(
        ConfigError, match=f"RANK={rank} WORLD_SIZE={world_size}: RANK must be from 0 to WORLD_SIZE - 1"
    ):
        launched_ranks()


def test_overrides_by_field_section_and_dotted_name() -> None:
    config = load_config(TINY, steps=3, model={"n_layers": 2}, **{"train.lr": 0.5, "model.backend": "cpu"})
    assert (config.train.steps, config.model.n_layers, config.train.lr) == (3, 2, 0.5)
    assert config.model.backend == "cpu"
    with pytest.raises(ConfigError, match="unknown key 'stepz'; did you mean 'steps'"):
        load_config(TINY, stepz=3)
    with pytest.raises(ConfigError, match=r"'backend' is a key of several sections; give model\.backend or parallel"):
        load_config(TINY, backend="auto")


def test_a_binary_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        load_config(ROOT / "examples" / "data" / "kjv.parquet")


def test_a_data_path_is_relative_to_its_yaml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    path = load_config(TINY).data.path
    assert Path(path).samefile(ROOT / "examples" / "data" / "kjv.parquet")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "train.lr={"), "train.lr='{': must be a number, got '{'"),
        (("--set", "train.lr"), "--set train.lr: must be SECTION.KEY=VALUE"),
        (("--set", "train.stepz=3"), "unknown key 'train.stepz'; did you mean 'train.steps'?"),
        (("--set", "train.stats_every=3"), "unknown key 'train.stats_every'; did you mean 'trace.stats_every'?"),
        (
            ("--steps", "3", "--set", "train.steps=4"),
            "another option, or another --set, sets train.steps too; give one",
        ),
    ],
)
def test_set_is_refused_with_a_sentence(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["--config", str(TINY), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_range_of_layers_is_no_number_to_the_base_60(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model:\n  n_layers: 60\ntrain:\n  gc_range: 6:12\n  lr: 1e-4\n  steps: 0x10\n")
    train = load_config(path).train
    assert (train.gc_range, train.lr, train.steps) == ((6, 12), 1e-4, 16)


def test_the_base_of_rotary_frequencies_and_the_norms_eps_reach_every_layer() -> None:
    config = load_config(TINY, **{"model.rope_theta": 100.0, "model.norm_eps": 0.25})
    model = build_model(config)
    norms = [m.eps for m in model.modules() if isinstance(m, RMSNorm)]
    assert norms == [0.25] * (2 * config.model.n_layers + 1)
    x = torch.full((1, config.model.dim), 3.0)
    torch.testing.assert_close(model.norm(x), x / math.sqrt(9.25))
    rotaries = [m for m in model.modules() if isinstance(m, Rotary)]
    assert len(rotaries) >= config.model.n_layers
    for rotary in rotaries:
        both, _ = rotary.table(torch.tensor([1]), torch.float64)
        angles = 100.0 ** (-torch.arange(0, rotary.d, 2, dtype=torch.float64) / rotary.d)
        torch.testing.assert_close(both.flatten()[: rotary.d // 2], angles.cos(), rtol=1e-6, atol=1e-6)


def test_every_option_is_named_in_a_configuration_a_test_or_a_page() -> None:
    folders = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests_cpu").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in folders)
    names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
