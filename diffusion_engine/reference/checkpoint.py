# Generated from notebooks/source/15_checkpoint.py by `course export`.
# Do not edit: change the chapter and export again.

import difflib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from diffusion_engine.files import read_header

WEIGHTS = "diffusion_pytorch_model"  # the stem of diffusers' weight files
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class KeyMap:
    """How a checkpoint's tensors become ours.

    Args:
        names: our module or tensor → theirs; ``.weight`` and ``.bias`` follow by themselves. ``*`` is a block's number;
            ``{to_q,to_k,to_v}`` are several of theirs, stacked along the rows into one of ours.
        changes: our module or tensor → what happens to each of theirs on the way.
        unused: theirs that we compute ourselves.
        fp32: ours that stay fp32 whatever dtype is asked for.
    """

    names: dict[str, str]
    changes: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What each ``*`` stands for, then the leaf (``.weight``, ``.bias`` or nothing); None where ``name`` does not fit."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)") + r"(\.weight|\.bias|)", name)
    return found and found.groups()


def their_names(key_map: KeyMap, name: str) -> list[str]:
    """The checkpoint's tensors that make our ``name``, in the order of their rows.

    Raises:
        KeyError: the map is silent on ``name``: a mistake of the map, not of the checkpoint.
    """
    for ours, theirs in key_map.names.items():
        if groups := match(ours, name):
            for number in groups[:-1]:
                theirs = theirs.replace("*", number, 1)
            before, _, rest = theirs.partition("{")
            inside, _, after = rest.partition("}")
            return [f"{before}{part}{after}{groups[-1]}" for part in inside.split(",")]
    raise KeyError(f"the key map is silent on {name}")


def flatten_patches(weight: Tensor) -> Tensor:
    """A patch convolution (D, C, ph, pw) or (D, C, pt, ph, pw) as a linear layer (D, pt · ph · pw · C), channels last."""
    return weight.movedim(1, -1).flatten(1)


def swap_halves(tensor: Tensor) -> Tensor:
    """(scale, shift) ↔ (shift, scale) along the rows: diffusers' ``AdaLayerNormContinuous`` stores the scale first."""
    return torch.cat(tensor.chunk(2)[::-1])


def change_of(key_map: KeyMap, name: str) -> Callable[[Tensor], Tensor]:
    """What happens to each tensor that makes our ``name``; to most, nothing."""
    return next((change for ours, change in key_map.changes.items() if match(ours, name)), lambda tensor: tensor)


class Source(NamedTuple):
    """A tensor on disk as its file's header tells it; not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_json(file: Path) -> dict:
    """A JSON object.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    if not file.is_file():
        raise ValueError(f"model file {file} is missing; give a folder that diffusers' save_pretrained wrote")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"model file {file} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"model file {file} is damaged: it is not a JSON object")
    return content


def list_tensors(folder: Path) -> dict[str, Source]:
    """Every tensor of a checkpoint folder, in one safetensors file or in the shards that an index names.

    Raises:
        ValueError: no weights or only pickles, a damaged or truncated file, a missing shard, an index that is wrong.
    """
    plain, index = folder / f"{WEIGHTS}.safetensors", folder / f"{WEIGHTS}.safetensors.index.json"
    if index.is_file() and not plain.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ValueError(f"model file {index} is damaged: it has no weight_map from tensors to files")
    else:
        variants = [path for path in sorted(folder.glob(f"{WEIGHTS}.*.safetensors")) if "-of-" not in path.name]
        file = variants[0] if variants and not plain.is_file() else plain  # a variant is the same in fp16 or bf16
        places = dict.fromkeys(read_header(file), file.name)
    files = {place: folder / Path(place).name for place in sorted(set(places.values()))}
    headers = {place: read_header(file) for place, file in files.items()}
    for name, place in places.items():
        if name not in headers[place]:
            raise ValueError(f"model file {files[place]} lacks {name}, which {index.name} places there")
    return {name: Source(files[place], **headers[place][name]) for name, place in places.items()}


def check_tensors(model: nn.Module, tensors: dict[str, Source], key_map: KeyMap) -> None:
    """Compare all names, types and shapes before anything is read.

    Raises:
        ValueError: names the first tensor that is missing, has another type or shape, or has no place in the model.
    """
    wanted = set()
    for name, ours in model.state_dict().items():
        keys, change = their_names(key_map, name), change_of(key_map, name)
        for key in keys:
            if key not in tensors:
                near = "".join(f"; it has {other}" for other in difflib.get_close_matches(key, tensors, n=1))
                raise ValueError(f"the checkpoint lacks {key}, which makes {name}{near}")
            if tensors[key].dtype not in FLOATS:
                raise ValueError(f"the checkpoint holds {tensors[key].dtype} in {key}; expected {', '.join(FLOATS)}")
        shapes = [list(change(torch.empty(tensors[key].shape, device="meta")).shape) for key in keys]
        rows = sum(shape[0] for shape in shapes)
        if any([rows, *shape[1:]] != [*ours.shape] for shape in shapes):
            found = " and ".join(f"{key} {[*tensors[key].shape]}" for key in keys)
            raise ValueError(f"{found} in the checkpoint do not make {name} {[*ours.shape]}")
        wanted.update(keys)
    left = [key for key in tensors if key not in wanted and not any(match(p, key) for p in key_map.unused)]
    if left:
        raise ValueError(f"the checkpoint has {len(left)} tensors without a place in the model, {left[0]} first")


def fill(
    model: nn.Module, tensors: dict[str, Source], key_map: KeyMap, device="cpu", dtype: torch.dtype | None = None
) -> None:
    """Give a model on the meta device its weights, one tensor of the checkpoint at a time, each straight into its place.

    Args:
        tensors: what `list_tensors` found and `check_tensors` passed.
        device: where the weights go. dtype: what they are converted to; None keeps the checkpoint's.
    """
    with ExitStack() as stack:
        files = {file: stack.enter_context(safe_open(file, "pt")) for file in {t.file for t in tensors.values()}}
        for name, empty in model.state_dict().items():
            ours, row = None, 0
            for key in their_names(key_map, name):
                part = change_of(key_map, name)(files[tensors[key].file].get_tensor(key))
                if ours is None:
                    kept = torch.float32 if any(match(p, name) for p in key_map.fp32) else dtype or part.dtype
                    ours = torch.empty(empty.shape, dtype=kept, device=device)
                ours[row : row + len(part)] = part
                row += len(part)
            owner, _, leaf = name.rpartition(".")
            place = model.get_submodule(owner)
            setattr(place, leaf, nn.Parameter(ours, requires_grad=False) if leaf in place._parameters else ours)


def require(config, **built) -> None:
    """Raise ValueError where an entry of a configuration is not the one value that is built here; names both."""
    for name, value in built.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} {getattr(config, name)!r} is not built here; try {value!r}")


def read_config(kind: type, values: dict) -> Any:
    """A model's sizes from ``config.json``: the dataclass ``kind`` has diffusers' names and defaults.

    Raises:
        ValueError: an entry that ``kind`` does not know and that is not off.
    """
    known = {f.name for f in fields(kind)}
    for name, value in values.items():
        if name not in known and not name.startswith("_") and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"config.json sets {name} to {value!r}, which is unknown here; the numbers would differ")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})


def load(kind: type, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """A model of class ``kind`` from a folder with ``config.json`` and safetensors, in evaluation mode.

    ``kind.Config`` is a dataclass as `read_config` takes it, ``kind.key_map(config)`` a `KeyMap`, ``kind(config)`` the model.

    Args:
        device: where the weights go. dtype: what they are converted to; None keeps the checkpoint's.

    Raises:
        ValueError: a missing, damaged or truncated file, a configuration or a tensor that does not fit; names it.
    """
    folder = Path(folder)
    try:
        config = read_config(kind.Config, read_json(folder / "config.json"))
        with torch.device("meta"):
            model = kind(config)
        tensors, key_map = list_tensors(folder), kind.key_map(config)
        check_tensors(model, tensors, key_map)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder} cannot become {kind.__name__}: {error}") from None
    fill(model, tensors, key_map, device, dtype)
    return model.eval()


def hub_cache() -> Path:
    """Where the hub's tools keep what they fetched: $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub."""
    return Path(
        os.environ.get("HF_HUB_CACHE") or f"{os.environ.get('HF_HOME', '~/.cache/huggingface')}/hub"
    ).expanduser()


def find_folder(model: str | Path, subfolder: str = "transformer", download: bool = False) -> Path:
    """The folder with ``config.json``: ``model/subfolder``, or ``model`` itself, or the same in a hub id's snapshot.

    Args:
        model: a folder, or ``owner/name`` on the hub: looked up in the local cache, never fetched unasked.
        download: fetch it from the hub; what is in the cache is not fetched again.

    Raises:
        ValueError: neither a folder nor in the cache; with ``download``: absent, gated, or no connection.
    """
    folder = Path(model)
    if not folder.is_dir():
        if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)):
            raise ValueError(f"model {str(model)!r} is neither a folder nor a hub id such as owner/name")
        if download:
            fetch(str(model), subfolder)
        home = hub_cache() / ("models--" + str(model).replace("/", "--"))
        version = home / "refs" / "main"
        folder = home / "snapshots" / (version.read_text().strip() if version.is_file() else "none")
    for place in (folder / subfolder, folder):
        if (place / "config.json").is_file():
            return place
    where = "has no config.json" if Path(model).is_dir() else f"is no folder and not in the cache {hub_cache()}"
    raise ValueError(f"model {model} ({subfolder}) {where}; --download fetches what a hub id names")


def fetch(model: str, subfolder: str) -> None:
    """Fetch one part of a model from the hub into the cache: configuration and safetensors, nothing that can run.

    Raises:
        ValueError: the model is absent or gated, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    names = ["config.json", f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json", f"{WEIGHTS}-*.safetensors"]
    reasons = {"GatedRepoError": f"it is gated: accept its licence at huggingface.co/{model}, then `hf auth login`"}
    reasons["RepositoryNotFoundError"] = "the hub has no such model, or it is private"
    try:
        snapshot_download(model, cache_dir=hub_cache(), allow_patterns=[f"{subfolder}/{name}" for name in names])
    except OSError as error:  # every failure of the hub's own client is one
        reason = reasons.get(type(error).__name__, str(error).partition("\n")[0])
        raise ValueError(f"model {model} cannot be fetched: {reason}") from None


class Output(NamedTuple):
    """What diffusers' pipelines take from a transformer: ``out.sample`` or ``out[0]``."""

    sample: Tensor


class DropIn(nn.Module):
    """One of our models behind diffusers' call, for ``pipe.transformer = …``.

    Args:
        model: has ``config``, a dataclass of diffusers' names, and ``as_diffusers``, whose arguments are named as theirs.

    Raises:
        ValueError: at the call, an argument that ``as_diffusers`` does not take and that is not empty.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config
        self.takes = list(inspect.signature(model.as_diffusers).parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of most weights: a few may be kept in fp32."""
        return min((weight.dtype for weight in self.parameters()), key=lambda dtype: dtype.itemsize)

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.parameters()).device

    @contextmanager
    def cache_context(self, name: str) -> Iterator[None]:
        """Pipelines announce "cond" and "uncond" here, for step caches; there is none."""
        yield

    def forward(self, *args, return_dict: bool = True, **kwargs) -> Output | tuple[Tensor]:
        given = dict(zip(self.takes, args)) | {name: value for name, value in kwargs.items() if not _empty(value)}
        if unknown := [name for name in given if name not in self.takes]:
            raise ValueError(f"{unknown[0]} is unknown to the drop-in; it takes {', '.join(self.takes)}")
        sample = self.model.as_diffusers(**given)
        return Output(sample) if return_dict else (sample,)


def _empty(value: Any) -> bool:
    """None, or a container with nothing in it."""
    return value is None or isinstance(value, (dict, list, tuple)) and not value
