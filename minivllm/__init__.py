"""The old engine: a small autoregressive Qwen3, built by the appendix chapters A1–A3; it knows nothing of diffusion.

    python -m minivllm "red"

Names are handed on when they are first asked for (PEP 562), so that a chapter can run while its own module is missing.
"""

from importlib import import_module

_HOMES = {
    "ASSETS": "shipped",
    "Qwen3": "qwen3",
    "Qwen3Config": "qwen3",
    "KVCache": "kv_cache",
    "Sampling": "kv_cache",
    "generate": "kv_cache",
    "Engine": "paged_kv",
    "PagedKVCache": "paged_kv",
}

__all__ = [*_HOMES]


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
