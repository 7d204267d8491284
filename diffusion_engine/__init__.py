"""A small inference engine for modern diffusion models, built chapter by chapter in ``notebooks/source``.

    from diffusion_engine import TextToImage

    engine = TextToImage.from_pretrained()
    engine("red apple").images[0]

Names are handed on when they are first asked for (PEP 562): importing the package imports neither torch nor any chapter's
module, so a chapter can run while its own module is still missing, and the command line answers at once.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "TextToImage": "engine",
    "TextToVideo": "engine",
    "EngineWarning": "engine",
    "Result": "pipeline",
    "StepInfo": "pipeline",
    "NotFiniteError": "pipeline",
    "Request": "request",
    "load_model": "model_folder",
    "save_model": "model_folder",
    "load_clip_model": "engine",
    "save_clip_model": "model_folder",
    "read_record": "files",
    "save_picture": "files",
    "save_clip": "files",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
