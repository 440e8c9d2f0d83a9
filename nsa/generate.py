"""``python -m nsa.generate CHECKPOINT --prompt TEXT``: continue a text from a checkpoint, token by token with the cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.config import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn


def continuations(
    model: nn.Module, prompt: torch.Tensor, count: int, *, temperature: float, generator: torch.Generator | None = None
) -> Iterator[int]:
    """Yield ``count`` tokens after ``prompt`` (int64 [S], S >= 1), each drawn at ``temperature``; 0 takes the likeliest.

    A model of NSA layers reads each token once, by its cache; one with dense attention reads all of them again.
    """
    import torch

    from nsa.model.attention import NSAAttention
    from nsa.model.decoding import KVCache

    blocks = model.get_submodule("blocks")
    is_cached = all(isinstance(block.get_submodule("attn"), NSAAttention) for block in blocks.children())
    caches = [KVCache() for _ in blocks.children()] if is_cached else None
    seen, tokens = prompt[None], prompt[None]
    for _ in range(count):
        with torch.no_grad():
            logits = model(tokens, caches) if caches is not None else model(seen)
        scores = logits[0, -1].float()
        if temperature == 0:
            token = scores.argmax()
        else:
            # The largest becomes 0 before the division, which a small temperature would make infinite.
            scores = (scores - scores.max()).double() / temperature
            token = torch.multinomial(scores.softmax(-1).float(), 1, generator=generator)[0]
        yield int(token)
        tokens = token.reshape(1, 1)
        if caches is None:
            seen = torch.cat((seen, tokens), 1)


def load(checkpoint: Path) -> tuple[nn.Module, str]:
    """Return the model of a checkpoint (a step_* folder), for inference, and the name of its tokenizer.

    Raises ConfigError for a damaged checkpoint.
    """
    from nsa.training.checkpoint import load_model

    model, described = load_model(checkpoint)
    return model.eval(), str(described.data.get("tokenizer", "byte"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsa.generate", description=(__doc__ or "").partition("``: ")[2])
    parser.add_argument("checkpoint", type=Path, help="a step_* folder that --save-every wrote")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what is continued")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1:
        parser.error(f"--tokens {arguments.tokens}: must be at least 1")
    if not arguments.temperature >= 0:
        parser.error(f"--temperature {arguments.temperature}: must be 0 or more")
    if not -(2**63) <= arguments.seed < 2**64:
        parser.error(f"--seed {arguments.seed}: must be from -2**63 to 2**64 - 1")
    if not arguments.prompt:
        parser.error("--prompt: is empty; give a text to continue")
    # So Python gives bytes that it cannot read.
    if any("\ud800" <= character <= "\udfff" for character in arguments.prompt):
        parser.error("--prompt: is not text in UTF-8; give it in UTF-8")
    try:
        return _print(arguments)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _print(arguments: argparse.Namespace) -> int:
    import torch

    from nsa.data.tokens import open_tokenizer

    model, name = load(arguments.checkpoint)
    tokenizer = open_tokenizer(name)
    (encoded,) = tokenizer.encode([arguments.prompt.encode()])
    if len(encoded) < 2:
        raise ConfigError("--prompt: has no tokens by the checkpoint's tokenizer; give another text")
    prompt = torch.tensor([int(token) for token in encoded[:-1]])  # without the separator: the text goes on
    drawn = torch.Generator().manual_seed(arguments.seed)
    print(arguments.prompt, end="", flush=True)
    end, found = int(encoded[-1]), []
    for token in continuations(model, prompt, arguments.tokens, temperature=arguments.temperature, generator=drawn):
        if token == end:
            break
        found.append(token)
    print(tokenizer.decode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
