"""Secrets are masked, by the name of a variable or option and by the form of a value; and nothing else is masked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nsa.trace.environment import environment
from nsa.trace.secrets import masked, masked_arguments, masked_variables
from pytest_nsa.testing import run_example

SECRET = "s3cr3tvalue0123456789"


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@hub.example/x", f"postgres://{SECRET}@db/x", f"Authorization: Bearer {SECRET}", f"basic {SECRET}==",
        f"train.py --token {SECRET} --steps 3",
        f'["--token", "{SECRET}"]', f"--hub-api-key={SECRET}", f"password={SECRET};user=me", f"url?token={SECRET}&x=1",
        f'{{"api_key": "{SECRET}"}}', f"hf_{SECRET}", f"sk-{SECRET}", "AKIAS3CR3TVALUE01234", f"ghp_{SECRET}", f"xoxb-{SECRET}",
        f"eyJhbGciOiJIUzI1.{SECRET}.{SECRET}", f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_what_has_the_form_of_a_secret(text: str) -> None:
    assert SECRET not in masked(text)
    assert "S3CR3T" not in masked(text)
    assert "***" in masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True,max_split_size_mb:128", "/data/tokens/part-0.parquet", "https://hub.example/x?rev=main", "a key",
        "10.0.0.1:29500", "eth0", "key value stores", "tokenizer=bytes", "monkey=3", "me@example.org", "",
    ],
)  # fmt: skip
def test_what_has_not(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("unit", ["-", "--", "-eyJ", "'-", "key ", "a://", "token=", "-----BEGIN "])
def test_a_long_text_is_masked_in_time_that_grows_with_its_length(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    assert len(masked(text)) <= len(text) + 400_000


def test_variables_and_arguments() -> None:
    kept = {
        "PYTORCH_CUDA_ALLOC_CONF": "a:b",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_SOCKET_IFNAME": "eth0",
        "KEYBOARD": "de",
    }
    hidden = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "WANDB_API_KEY", "GIT_AUTH", "TORCH_CREDENTIALS")
    assert masked_variables({**kept, **dict.fromkeys(hidden, "x")}) == {**kept, **dict.fromkeys(hidden, "***")}
    command = [
        "train.py",
        "--token",
        SECRET,
        "--hub-password",
        SECRET,
        "--steps",
        "3",
        f"--api-key={SECRET}",
        "--key",
        "--x",
    ]
    assert masked_arguments(command) == [
        "train.py", "--token", "***", "--hub-password", "***", "--steps", "3", "--api-key=***", "--key", "--x",
    ]  # fmt: skip


def test_env_json_of_a_session_and_of_a_training(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-o cache_dir=/tmp/{SECRET[:4]} -p no:cacheprovider")
    monkeypatch.setenv("NCCL_X", f"https://u:{SECRET}@hub")
    monkeypatch.setenv("TORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    result = run_example(pytester, "@world_size(2)\ndef test_it(group): pass")
    assert result.run is not None
    written = (result.run / "env.json").read_text()
    assert SECRET not in written
    assert json.loads(written)["variables"]["TORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", SECRET])
    of_a_training = json.dumps(environment())
    assert "hub" in of_a_training
    assert SECRET not in of_a_training
