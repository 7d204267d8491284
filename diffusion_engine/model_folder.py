"""Model folders: configuration, safetensors files and tokenizer, every shape and every hash checked; the clip model's, too.

torch is imported when weights are loaded and not before, so that a damaged folder is named at once.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from diffusion_engine.files import read_header, sha256, write_files
from diffusion_engine.request import SIZES, make_request, shown

SHIPPED_MODEL = Path(__file__).parent / "assets" / "model"
FORMAT = "diffusion-engine text-to-image 1"
WEIGHTS = {"dit": "dit.safetensors", "vae": "vae.safetensors", "text_encoder": "text_encoder.safetensors"}
TOKENIZER = "tokenizer.json"
SHIPPED_CLIP_MODEL = Path(__file__).parent / "assets" / "clip_model"
CLIP_FORMAT = "diffusion-engine text-to-clip 1"
CLIP_WEIGHTS = {"dit": "dit.safetensors", "vae": "vae.safetensors", "refiner": "refiner.safetensors"}
CLIP_SIZES = (32, 64)


class Model(NamedTuple):
    """What a model folder holds, ready to run."""

    dit: object
    vae: object
    text_encoder: object
    tokenizer: object
    config: dict
    fingerprint: str  # first 16 hex digits over all file hashes


def check_model_folder(path: str | Path | None = None) -> dict:
    """Look a model folder over without loading it, and return its configuration. Takes milliseconds, imports no torch.

    Args:
        path: the folder; None is the model that ships with the package.

    Raises:
        ValueError: a missing, truncated or foreign file; the message names it.
    """
    folder = SHIPPED_MODEL if path is None else Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"model folder {folder} does not exist; it should hold config.json and {', '.join(WEIGHTS.values())}"
        )
    config = _read_json(folder / "config.json")
    if config.get("format") != FORMAT:
        found = shown(config.get("format"))
        raise ValueError(f"{folder / 'config.json'} has the format {found}; this version reads {FORMAT!r}")
    for part in ("sha256", *WEIGHTS):
        if not isinstance(config.get(part), dict):
            raise ValueError(f"{folder / 'config.json'} has no entry {part!r}; it is not a model's configuration")
    try:
        make_request(config, "")  # what it recommends can be drawn
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} recommends what cannot be drawn: {error}") from None
    for name in (*WEIGHTS.values(), TOKENIZER):
        if name not in config["sha256"]:
            raise ValueError(f"{folder / 'config.json'} has no sha256 of {name}; save the model with save_model")
    for name in WEIGHTS.values():
        read_header(folder / name)
    _read_json(folder / TOKENIZER)
    return config


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"model file {path} is missing; restore it, or give another model folder")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model file {path} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"model file {path} is damaged: it is not a JSON object")
    return content


def load_model(path: str | Path | None = None, device: str = "cpu", dtype: str = "float32") -> Model:
    """Load a model folder: configuration, three safetensors files, tokenizer; every shape and every hash is checked.

    Args:
        path: the folder; None is the model that ships with the package.
        device: where the weights go. dtype: what they are converted to; the files may hold fp16.

    Raises:
        ValueError: a missing, truncated, wrong-shaped, foreign or altered file; the message names it.
    """
    from diffusion_engine.dit import DiT, DiTConfig
    from diffusion_engine.text_conditioning import PromptTokenizer, TextEncoder, TextEncoderConfig
    from diffusion_engine.vae import VAE, VAEConfig

    folder = SHIPPED_MODEL if path is None else Path(path)
    config = check_model_folder(folder)
    kinds = {"dit": (DiT, DiTConfig), "vae": (VAE, VAEConfig), "text_encoder": (TextEncoder, TextEncoderConfig)}
    parts = {}
    for part, (kind, settings) in kinds.items():
        parts[part] = load_part(folder, WEIGHTS[part], part, kind, settings, config, device, dtype)
    _check_hash(folder / TOKENIZER, (folder / TOKENIZER).read_bytes(), config)
    try:
        tokenizer = PromptTokenizer(str(folder / TOKENIZER), parts["text_encoder"].config.max_length)
    except Exception as error:  # the tokenizers library has no type of its own
        raise ValueError(f"model file {folder / TOKENIZER} is not a tokenizer: {error}") from None
    if tokenizer.vocab_size > (known := parts["text_encoder"].config.vocab_size):
        words = f"{tokenizer.vocab_size} tokens, the text encoder knows {known}"
        raise ValueError(f"model file {folder / TOKENIZER} does not fit config.json: {words}")
    return Model(**parts, tokenizer=tokenizer, config=config, fingerprint=fingerprint(config))


def load_part(folder: Path, name: str, part: str, kind, settings, config: dict, device: str, dtype: str):
    """One module of a model folder on its device, its file's shapes and hash checked."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    file, module = folder / name, _build(kind, settings, config[part], folder / "config.json", part)
    _check_shapes(file, {name: tuple(value.shape) for name, value in module.state_dict().items()})
    data = file.read_bytes()
    _check_hash(file, data, config)
    try:
        weights = load(data)
    except SafetensorError as error:
        raise ValueError(f"model file {file} is damaged: {error}; restore it") from None
    module.load_state_dict({name: value.to(torch.float32) for name, value in weights.items()}, assign=True)
    return module.to(device, getattr(torch, dtype)).eval().requires_grad_(False)


def _stored(module, dtype: str) -> bytes:
    """A module's weights as a safetensors file."""
    import torch
    from safetensors.torch import save

    return save({k: v.detach().to("cpu", getattr(torch, dtype)).contiguous() for k, v in module.state_dict().items()})


def fingerprint(config: dict) -> str:
    """One name for all files of a model: 16 hex digits."""
    return sha256(json.dumps({name: config["sha256"][name] for name in (*WEIGHTS.values(), TOKENIZER)}).encode())[:16]


def _build(kind, settings, values: dict, file: Path, part: str):
    """A module with uninitialised weights: they are all replaced, and no random number is drawn."""
    from torch.overrides import TorchFunctionMode

    class SkipInit(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", "") in (
                "normal_",
                "uniform_",
            ):
                return args[0] if args else kwargs["tensor"]
            return func(*args, **(kwargs or {}))

    try:
        config = settings(**values)
        with SkipInit():
            return kind(config)
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"model file {file} does not describe a {part}: {str(error).splitlines()[0]}") from None


def _check_shapes(file: Path, expected: dict[str, tuple[int, ...]]) -> None:
    header = read_header(file)
    if missing := sorted(set(expected) - set(header)):
        raise ValueError(f"model file {file} lacks {len(missing)} of {len(expected)} tensors, {missing[0]} first")
    if unknown := sorted(set(header) - set(expected)):
        raise ValueError(f"model file {file} has {len(unknown)} tensors that the model lacks, {unknown[0]} first")
    for name, shape in expected.items():
        if header[name]["shape"] != shape:
            found = f"{name} has shape {list(header[name]['shape'])}"
            raise ValueError(f"model file {file} does not fit config.json: {found}, expected {list(shape)}")
        if header[name]["dtype"] not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"model file {file} holds {header[name]['dtype']} in {name}; expected F32, F16 or BF16")


def _check_hash(file: Path, data: bytes, config: dict) -> None:
    expected = config["sha256"][file.name]
    if sha256(data) != expected:
        found = f"sha256 {sha256(data)[:12]}…, config.json says {shown(expected)[:14]}…"
        raise ValueError(f"model file {file} was altered or belongs to another model: {found}; restore it")


def save_model(
    folder: str | Path, *, dit, vae, text_encoder, tokenizer: str, recommended: dict, dtype: str = "float16"
) -> dict:
    """Write a model folder that `load_model` reads, each file whole or not at all; returns its configuration.

    Args:
        dit, vae, text_encoder: modules with a ``config`` dataclass.
        tokenizer: the content of ``tokenizer.json``.
        recommended: ``guidance_scale``, ``num_inference_steps``, ``shift``, ``height``, ``width``.
        dtype: what the weights are stored in.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    modules = {"dit": dit, "vae": vae, "text_encoder": text_encoder}
    contents = {TOKENIZER: tokenizer.encode()} | {WEIGHTS[part]: _stored(m, dtype) for part, m in modules.items()}
    config = {"format": FORMAT, **{part: asdict(module.config) for part, module in modules.items()}}
    config |= {"recommended": dict(recommended), "sizes": list(SIZES)}
    config["sha256"] = {name: sha256(data) for name, data in contents.items()}
    contents["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    write_files({folder / name: data for name, data in contents.items()})
    return config


# The clip model's folder: a VAE, a refiner and a DiT for clips; the text encoder and tokenizer are the picture model's


def check_clip_folder(path: str | Path | None = None) -> dict:
    """Look a clip model's folder over without loading it; see `check_model_folder`.

    Raises:
        ValueError: a missing, truncated or foreign file, or another text encoder in the package than it was trained over.
    """
    folder = SHIPPED_CLIP_MODEL if path is None else Path(path)
    if not folder.is_dir():
        names = ", ".join(CLIP_WEIGHTS.values())
        raise ValueError(f"clip model folder {folder} does not exist; it should hold config.json and {names}")
    config = _read_json(folder / "config.json")
    if config.get("format") != CLIP_FORMAT:
        found = shown(config.get("format"))
        raise ValueError(f"{folder / 'config.json'} has the format {found}; animate reads {CLIP_FORMAT!r}")
    for part in ("sha256", "text", "dit", "vae", "recommended"):
        if not isinstance(config.get(part), dict):
            raise ValueError(f"{folder / 'config.json'} has no entry {part!r}; it is not a clip model's configuration")
    for name in CLIP_WEIGHTS.values():
        if name not in config["sha256"]:
            raise ValueError(f"{folder / 'config.json'} has no sha256 of {name}; save the model with save_clip_model")
        read_header(folder / name)
    text = check_model_folder()["sha256"]
    if any(text.get(name) != digest for name, digest in config["text"].items()):
        raise ValueError(f"{folder} was trained over another text encoder than {SHIPPED_MODEL} holds; restore both")
    return config


def clip_fingerprint(config: dict) -> str:
    """One name for all files of a clip model, the text files included: 16 hex digits."""
    names = {name: config["sha256"][name] for name in CLIP_WEIGHTS.values()}
    return sha256(json.dumps(names | config["text"]).encode())[:16]


def save_clip_model(folder: str | Path, *, dit, vae, refiner, recommended: dict, dtype: str = "float16") -> dict:
    """Write a folder that `engine.load_clip_model` reads, each file whole or not at all; returns its configuration.

    Args:
        dit, vae, refiner: modules with a ``config`` dataclass. dtype: what the weights are stored in.
        recommended: ``guidance_scale``, ``num_inference_steps``, ``shift``, ``height``, ``width``, ``frames``.
    """
    folder, modules = Path(folder), {"dit": dit, "vae": vae, "refiner": refiner}
    folder.mkdir(parents=True, exist_ok=True)
    contents = {CLIP_WEIGHTS[part]: _stored(module, dtype) for part, module in modules.items()}
    config = {"format": CLIP_FORMAT, **{part: asdict(module.config) for part, module in modules.items()}}
    config |= {"recommended": dict(recommended), "sizes": list(CLIP_SIZES)}
    config["sha256"] = {name: sha256(data) for name, data in contents.items()}
    text = check_model_folder()["sha256"]
    config["text"] = {name: text[name] for name in (WEIGHTS["text_encoder"], TOKENIZER)}
    contents["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    write_files({folder / name: data for name, data in contents.items()})
    return config
