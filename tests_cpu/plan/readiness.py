"""Whether a run of the plan shows that the model is ready for production, and by which criteria."""

from collections.abc import Mapping

from pytest_nsa.diagnosis.decision import REFUSED
from pytest_nsa.diagnosis.verdict import Verdict
from tests_cpu.plan.scenarios import SEEDS

# Production's criteria: a rank's memory with checkpointing, and the tokens that all ranks train on.
MAX_GPU_BYTES, MIN_TOKENS_PER_S = 30e9, 50
CORE = tuple(row.name for row in SEEDS)
LONG = ("stability_100", "fsdp_synthetic_200", "fsdp_fineweb_300", "fsdp_diagnosed_500")

Verdicts = Mapping[str, Verdict]


def tells(verdict: Verdict) -> bool:
    """Return whether a row ran: it was not skipped or cut off, and had ranks."""
    return verdict.outcome not in ("SKIP", "INTERRUPTED") and verdict.rule != REFUSED


def readiness(verdicts: Verdicts) -> str:
    """Return whether the run shows that the model is ready for production, and by which criteria."""
    lacking = [name for name in CORE if name not in verdicts or not tells(verdicts[name])]
    failed = [name for name, v in verdicts.items() if v.failed]
    missing = sum(v.cause == "unused_parameters" for v in verdicts.values() if v.failed)  # a stall's were still to come
    reasons = []
    if failed:
        reasons.append(f"{len(failed)} scenarios fail" if len(failed) > 1 else f"{failed[0]} fails")
    if missing:
        reasons.append(f"gradients are missing in {missing} of them")
    if lacking:
        reasons.append(f"{len(lacking)} of the {len(CORE)} of phases 1 to 5 did not run")
    # As the long scenarios measured them on a GPU.
    figures = [
        verdicts[name].figures for name in LONG if name in verdicts and verdicts[name].figures.get("peak_gpu_mib")
    ]
    peak = max((f["peak_gpu_mib"] * (1 << 20) for f in figures), default=0.0)
    rate = min((f["tokens_per_s"] for f in figures if "tokens_per_s" in f), default=0.0)
    if not (peak and rate):
        reasons.append("memory and throughput at production size were not measured (no GPU)")
    elif peak >= MAX_GPU_BYTES:
        reasons.append(f"a rank takes {peak / 1e9:.1f} GB, where {MAX_GPU_BYTES / 1e9:.0f} are allowed")
    if 0 < rate <= MIN_TOKENS_PER_S:
        reasons.append(f"{rate:,.0f} tokens/s, where {MIN_TOKENS_PER_S} are needed")
    if reasons:
        return f"Not ready for production: {'; '.join(reasons)}."
    measured = f"at most {peak / 1e9:.1f} GB a rank, at least {rate:,.0f} tokens/s"
    return (
        f"Ready for production: every scenario passes, no gradient is missing, at production size on a GPU; {measured}."
    )
