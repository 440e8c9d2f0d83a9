"""Secrets are masked, by the name of a variable or option and by the form of a value; and nothing else is masked."""

import json
import sys
from pathlib import Path

import pytest

from nsa.trace.environment import environment
from nsa.trace.secrets import masked, masked_arguments, masked_value, masked_variables
from pytest_nsa.testing import run_example

SECRET = "s3cr3tvalue0123456789"


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@hub.example/x", f"postgres://{SECRET}@db/x", f"Authorization: Bearer {SECRET}",
        f"basic {SECRET}==", f"train.py --token {SECRET} --steps 3", f'["--token", "{SECRET}"]', f"--hub-api-key={SECRET}",
        f"password={SECRET};user=me", f"url?token={SECRET}&x=1", f'{{"api_key": "{SECRET}"}}', f"hf_{SECRET}", f"sk-{SECRET}",
        "AKIAS3CR3TVALUE01234", f"ghp_{SECRET}", f"xoxb-{SECRET}", f"AccountName=x;AccountKey={SECRET};Suffix=y",
        f"PGPASSWORD={SECRET} psql", f"MYSQL_PWD={SECRET}", f"DB_PASS={SECRET}", f"login me password {SECRET}",
        f"Authorization: token {SECRET}", f"Cookie: a=b; session={SECRET}", f"https://x/y?X-Amz-Signature={SECRET}&b=1",
        f"https://x/y?sv=2&sig={SECRET}", f"https://hooks.slack.com/services/T1/B1/{SECRET}", f"accessToken: {SECRET}",
        f"{{'clientSecret': '{SECRET}'}}", f"api_key=['{SECRET}']", f"config.password={SECRET}", f"x-goog-api-key: {SECRET}",
        f"eyJhbGciOiJIUzI1.{SECRET}.{SECRET}", f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_what_has_the_form_of_a_secret(text: str) -> None:
    assert SECRET not in masked(text)
    assert "S3CR3T" not in masked(text)
    assert "***" in masked(text)


HEX, MIXED = "0123456789abcdef" * 4, "Ab3" * 30


@pytest.mark.parametrize(
    ("front", "rest"),
    [
        ("ASIA", "ABCDEFGH23456789"[:16]), ("LTAI", MIXED[:20]), ("AIza", MIXED[:35]), ("ya29.", MIXED[:40]),
        ("GOCSPX-", MIXED[:28]), ("ghr_", MIXED[:36]), ("glrt-", MIXED[:20]), ("xapp-1-", MIXED[:20]),
        ("123456789:AA", MIXED[:33]), ("dapi", HEX[:32]), ("sk-ant-api03-", MIXED), ("xai-", MIXED[:40]), ("nvapi-", MIXED[:64]),
        ("gsk_", MIXED[:52]), ("r8_", MIXED[:37]), ("wandb_v1_", MIXED[:40]), ("dckr_pat_", MIXED[:27]), ("npm_", MIXED[:36]),
        ("pypi-AgEIcHlwaS5vcmc", MIXED), ("rubygems_", HEX[:48]), ("sk_live_", MIXED[:24]), ("shpat_", HEX[:32]),
        ("SG.", f"{MIXED[:22]}.{MIXED[:43]}"), ("key-", HEX[:32]), ("hvs.", MIXED[:30]), ("dop_v1_", HEX),
        ("dp.pt.", MIXED[:43]), ("glsa_", f"{MIXED[:32]}_{HEX[:8]}"), ("sntrys_", MIXED[:60]), ("AGE-SECRET-KEY-1", "Q2" * 29),
    ],
)  # fmt: skip
def test_what_an_issuer_marks_at_the_front_of_its_secrets(front: str, rest: str) -> None:
    for text in (f"{front}{rest}", f"got '{front}{rest}', 3", f"x={front}{rest};y", f"({front}{rest})"):
        assert rest[-12:] not in masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens=4096", "max_tokens: 2048, loss: 0.5", "token=None", "use_auth_token=True", "the token is: expected",
        "def signature(a=1)", "second_pass: ok", "PWD=/home/me", "hf_model_from_pretrained",
        "ops_that_torch_registers_by_library", "risk-adjusted-return-model",
        "pytest -p no:cacheprovider", "author: me", "python -u train.py", "docker run -p 8080:80", "curl --user-agent me",
        "Basic understanding", "key_padding_mask=x", f"commit {HEX[:40]}", "secretary: x", "for key, value in pairs",
        "expandable_segments:True,max_split_size_mb:128", "/data/tokens/part-0.parquet", "https://hub.example/x?rev=main",
        "a key", "10.0.0.1:29500", "eth0", "key value stores", "tokenizer=bytes", "monkey=3", "me@example.org", "",
    ],
)  # fmt: skip
def test_what_has_not(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    "unit", ["-", "'-", "key ", "a://", "token=", "-----BEGIN ", "aB", "cookie:", "login x password "]
)
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
    command = f"train.py --token {SECRET} --hub-password {SECRET} --steps 3 --api-key={SECRET} --key --x"
    assert masked_arguments(command.split()) == command.replace(SECRET, "***").split()


def test_a_value_is_masked_by_the_name_in_its_pair() -> None:
    pairs = [["token", SECRET], ["rank1.apiKey", SECRET], ["loss", "0.5"], ["n_tokens", "4096"], ["key", "layers/3"]]
    assert masked_value(pairs) == [["token", "***"], ["rank1.apiKey", "***"], *pairs[2:]]
    fields = {
        "password": "123456",
        "use_auth_token": "True",
        "keys": "a b",
        "tokens_seen": 5,
        "nested": {"HF_TOKEN": SECRET},
    }
    assert masked_value(fields) == {**fields, "password": "***", "nested": {"HF_TOKEN": "***"}}


def test_env_json_of_a_session_and_of_a_training(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-o cache_dir=/tmp/{SECRET[:4]} -p no:cacheprovider")
    monkeypatch.setenv("NCCL_X", f"https://u:{SECRET}@hub")
    monkeypatch.setenv("TORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    result = run_example(pytester, "@world_size(2)\ndef test_it(group): pass")
    written = (result.run / "env.json").read_text()
    assert SECRET not in written
    assert json.loads(written)["variables"]["TORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", SECRET])
    of_a_training = json.dumps(environment())
    assert "hub" in of_a_training
    assert SECRET not in of_a_training
