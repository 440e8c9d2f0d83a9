"""Names of parameters and modules as the user knows them."""

_WRAPPERS = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """Return a parameter's or module's name without the prefixes that DDP, FSDP and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
