# Generated from notebooks/source/24_run.py by `course export`.
# Do not edit: change the chapter and export again.

import gc
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import PeakMeter, format_bytes
from diffusion_engine.optimizations import PromptTable, Upcast, multiplies
from diffusion_engine.pipeline import Result, Stopwatch, generate, to_pictures
from diffusion_engine.reference.checkpoint import find_folder, hub_cache, load, read_json
from diffusion_engine.reference.families import FAMILIES, Facts, Family
from diffusion_engine.scheduler import Schedule
from diffusion_engine.text_conditioning import PromptEmbeds


class Parts:
    """The parts of a pipeline's folder, each loaded when it is first asked for.

    Args:
        folder: as diffusers' ``save_pretrained`` writes it. name: of the family.
        device, dtype: of every part. offload: let the others go when another is asked for, so that the largest part
            decides how much memory is needed, and not the sum. hoist: the transformer makes once, for all steps, what
            looks at no latent; equal to 1e-5.
    """

    def __init__(self, folder: Path, name: str, device="cpu", dtype=torch.float32, offload=False, hoist=False):
        self.folder, self.family, self.device, self.dtype = Path(folder), FAMILIES[name], device, dtype
        self.offload, self.hoist = offload, hoist
        self.upcast = torch.device(device).type == "cpu" and not multiplies(dtype)  # kept so, multiplied in fp32
        self.kept: dict[str, Any] = {}

    def get(self, part: str) -> Any:
        """``transformer`` (ours), ``vae`` or ``encoders`` (diffusers' and transformers')."""
        if part not in self.kept:
            if self.offload:
                self.kept.clear()
                gc.collect()
            self.kept[part] = self._load(part)
        return self.kept[part]

    def _load(self, part: str) -> Any:
        if part == "transformer":
            return load(self.family.kind, self.folder / "transformer", self.device, self.dtype)
        if part == "encoders":
            if not (self.folder / "text_encoder").is_dir():
                raise ValueError(
                    f"{self.folder} holds no text_encoder to read the prompt; try a whole pipeline's folder"
                )
            return borrow_pipeline(self, transformer=None, vae=None)
        from diffusers import AutoModel

        vae = AutoModel.from_pretrained(str(self.folder), subfolder="vae", torch_dtype=self.dtype)
        return vae.to(self.device).eval().requires_grad_(False)

    def modules(self) -> list[nn.Module]:
        """What is loaded now."""
        found = [self.kept[part] for part in ("transformer", "vae") if part in self.kept]
        pipe = self.kept.get("encoders")
        return found + [m for m in (pipe.components.values() if pipe else ()) if isinstance(m, nn.Module)]


def borrow_pipeline(parts: Parts, **given: Any) -> Any:
    """diffusers' own pipeline from the folder, nothing fetched; what the folder lacks is None."""
    import diffusers
    import transformers

    for library in (diffusers.utils, transformers):
        library.logging.disable_progress_bar()
    kind = getattr(diffusers, parts.family.pipeline)
    names = [p.name for p in inspect.signature(kind).parameters.values() if p.default in (p.empty, None)]
    absent = {name: None for name in names if not (parts.folder / name).is_dir()} | given
    pipe = kind.from_pretrained(parts.folder, **absent, torch_dtype=parts.dtype, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(parts.device)


def find_pipeline(model: str | Path, download: bool = False) -> Path:
    """The folder of a whole pipeline: a folder, or a hub id in the local cache; ``download`` fetches all its parts.

    Raises:
        ValueError: neither; with ``download``: absent, gated, or no connection.
    """
    if download and not Path(model).is_dir():
        from diffusers import DiffusionPipeline

        try:
            DiffusionPipeline.download(str(model), cache_dir=hub_cache())
        except OSError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"model {model} cannot be fetched: {reason}") from None
    return find_folder(model).parent


@dataclass(frozen=True)
class Order:
    """What is asked for; None takes the family's own."""

    prompt: str = "a red apple"
    negative: str = ""
    seed: int = 0
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None

    def within(self, family: Family) -> "Order":
        """The same with the family's own where nothing was given."""
        return replace(self, **{f.name: getattr(family, f.name) for f in fields(self) if getattr(self, f.name) is None})


def latent_shape(parts: Parts, order: Order) -> tuple[tuple[int, ...], int]:
    """(C, h, w) or (C, T, h, w) of the latents, and their number of tokens, as transformer's and VAE's configurations say.

    Raises:
        ValueError: a side or a number of frames that the family does not draw; names the nearest.
    """
    config, vae = (read_json(parts.folder / part / "config.json") for part in ("transformer", "vae"))
    (time, side), packed, patch = parts.family.factors(vae), parts.family.packed, config.get("patch_size", 1)
    patch = patch[-1] if isinstance(patch, list) else patch
    unit = side * packed * patch
    for name, pixels in (("height", order.height), ("width", order.width)):
        if pixels < unit or pixels % unit:
            near = max(1, round(pixels / unit)) * unit
            raise ValueError(f"{name} {pixels} is not a multiple of {unit}; try {near}")
    if order.frames > 1 and not parts.family.is_clip:
        raise ValueError(f"frames {order.frames} are too many for a family that draws pictures; try 1")
    if (order.frames - 1) % time:
        below = (order.frames - 1) // time * time + 1
        raise ValueError(f"{order.frames} frames are not {time}k + 1; try {below} or {below + time}")
    grid = ((order.frames - 1) // time + 1, order.height // side, order.width // side)
    tokens = grid[0] * grid[1] * grid[2] // (packed * patch) ** 2
    return (config["in_channels"] // packed**2, *grid[0 if parts.family.is_clip else 1 :]), tokens


@torch.no_grad()
def encode(parts: Parts, prompts: tuple[str, str]) -> tuple[PromptEmbeds, PromptEmbeds | None]:
    """Prompt and negative prompt, read by the folder's text encoders; diffusers warns of words that it cuts off.

    Raises:
        ValueError: the folder has none.
    """
    from diffusers.utils import logging

    pipe, before = parts.get("encoders"), logging.get_verbosity()
    logging.set_verbosity_warning()
    try:
        return parts.family.encode(pipe, *prompts, parts.device)
    finally:
        logging.set_verbosity(before)


def network(parts: Parts, guidance: float, schedule: Schedule) -> Callable[[Tensor, Tensor, PromptEmbeds], Tensor]:
    """The transformer as chapter 08 calls it: (x, t, prompt) → velocity, fp32 outside, ``parts.dtype`` inside.

    Args:
        schedule: where it will be asked, and what it is told as time there.
    """
    family, vae, made = parts.family, read_json(parts.folder / "vae" / "config.json"), PromptTable()

    def run(x: Tensor, t: Tensor, *prompt: Tensor | None, **more) -> Tensor:
        net = parts.get("transformer")
        if not parts.hoist:
            return net(x, t, *prompt, **more)

        def ahead() -> dict[float, Any]:
            times = family.times(parts.folder, schedule)
            return dict(zip(times.tolist(), net.hoist(x.shape[1:], times.to(x.device), *prompt, **more)))

        return net.velocity(x, made.get(tuple(y for y in prompt if y is not None), ahead)[t[0].item()])

    velocity = family.network(run, parts.folder, schedule)

    def model(x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        net = parts.get("transformer")
        text, pooled = prompt.tokens.to(parts.dtype), prompt.pooled.to(parts.dtype)
        mask, extra = prompt.mask if family.masked else None, family.extra(net, x, guidance, vae)
        return velocity(x.to(parts.dtype), t, text, mask, pooled, **extra).float()

    return model


def draw(parts: Parts, order: Order, meter: Callable | None = None, callback: Callable | None = None) -> Result:
    """Chapter 10's loop on a real family: our transformer, schedule and guidance, the borrowed encoders and VAE.

    Returns:
        a `Result`; of a clip its images are the frames.

    Raises:
        ValueError: a size that the family cannot draw, or a scheduler that is not followed.
    """
    order = order.within(parts.family)
    shape, tokens = latent_shape(parts, order)
    scale = 1.0 if parts.family.embedded else order.guidance  # where it is embedded, one forward a step
    schedule, solver = parts.family.road(parts.folder, order.steps, tokens)
    with Upcast() if parts.upcast else nullcontext():
        return generate(
            [order.prompt],
            [order.seed],
            schedule,
            encode=lambda prompts: encode(parts, (prompts[0], order.negative)),
            velocity=lambda condition: guided_velocity(network(parts, order.guidance, schedule), *condition, scale),
            decode=lambda latents: parts.family.decode(parts.get("vae"), latents),
            shape=shape,
            device=parts.device,
            latents=parts.family.noise(order.seed, shape),
            solver=solver,
            meter=meter,
            callback=callback,
        )


def draw_theirs(parts: Parts, order: Order) -> tuple[Tensor, list]:
    """The same order through diffusers' pipeline, from words on: latents laid out as ours, and pictures."""
    family, order, pipe = parts.family, order.within(parts.family), borrow_pipeline(parts)
    asked = {"prompt": order.prompt} | ({} if family.embedded else {"negative_prompt": order.negative})
    asked |= family.settings | {"height": order.height, "width": order.width, "num_inference_steps": order.steps}
    asked |= {"num_frames": order.frames} if family.is_clip else {}
    rng = torch.Generator().manual_seed(order.seed)
    output = pipe(**asked, guidance_scale=order.guidance, generator=rng, output_type="latent")
    latents = output.frames if family.is_clip else output.images
    latents = family.unpacked(latents, latent_shape(parts, order)[0]).float()
    with torch.no_grad():
        return latents, to_pictures(family.decode(pipe.vae, latents))


class Need(NamedTuple):
    """Bytes that a run needs, by part."""

    encoders: int
    transformer: int
    vae: int
    denoise: int
    decode: int

    def kept(self) -> int:
        """Every part in memory at once."""
        return self.encoders + self.transformer + self.vae + max(self.denoise, self.decode)

    def offloaded(self) -> int:
        """One part at a time: the largest stage."""
        return max(self.encoders, self.transformer + self.denoise, self.vae + self.decode)


def needs(facts: Facts, order: Order, batch: int = 2, itemsize: int = 2) -> Need:
    """Bytes by formula: weights · s; denoise B · s · 12 · D · N; decode 3 maps of 256 channels, all frames at once or a few.

    Args:
        order: with height, width and frames. batch: B, samples a forward, 2 with batched guidance. itemsize: s, 2 for bf16.
    """
    billion = [round(1e9 * size) * itemsize for size in (facts.encoders, facts.transformer, facts.vae)]
    tokens = ((order.frames - 1) // facts.frames + 1) * (order.height // facts.side) * (order.width // facts.side)
    pixels = order.height * order.width * min(order.frames, facts.decoded or order.frames)
    return Need(*billion, batch * itemsize * 12 * facts.width * tokens, itemsize * 3 * 256 * pixels)


def memory_here(device: str = "cpu") -> int:
    """Bytes of memory that this machine, or its GPU, has."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verdict(found: bool, need: Need, memory: int) -> str:
    """runs, runs with offload, or blocked, and by what."""
    if not found:
        return "blocked: no weights here"
    if need.kept() <= memory:
        return "runs"
    if need.offloaded() <= memory:
        return "runs with offload"
    return f"blocked: needs {format_bytes(need.offloaded())} even with offload"


def list_families(order: Order = Order(), device: str = "cpu") -> list[dict[str, str]]:
    """One row a family: weights here or where, licence, bytes by formula at one size, the verdict on this machine."""
    rows = []
    for name, family in FAMILIES.items():
        facts, asked = family.facts, order.within(family)
        try:
            found = str(find_folder(facts.hub).parent)
        except ValueError:
            found = ""
        need = needs(facts, asked, batch=1 if family.embedded else 2)
        row = {"family": name, "weights": found or f"none; get {facts.hub} with --download", "licence": facts.licence}
        row |= {"size": f"{asked.height} × {asked.width}" + (f", {asked.frames} frames" if family.is_clip else "")}
        row |= {part: format_bytes(size) for part, size in need._asdict().items()}
        row |= {"kept": format_bytes(need.kept()), "offloaded": format_bytes(need.offloaded())}
        rows.append(row | {"verdict": verdict(bool(found), need, memory_here(device))})
    return rows


def profile(parts: Parts, order: Order) -> dict[str, tuple[float, int]]:
    """Stage → (seconds, peak bytes above the parts that were loaded before), measured in two runs.

    Counting bytes slows everything down, so the seconds are another run's.
    """
    seconds = draw(parts, order, Stopwatch(lambda: synchronize(parts.device))).seconds
    meter = PeakMeter(*parts.modules(), device=parts.device)
    draw(parts, order, meter)
    return {stage: (seconds[stage], meter.peak_bytes[stage]) for stage in seconds}


def synchronize(device) -> None:
    """Wait for the work that a GPU has in hand."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def profile_picture(measured: dict[str, tuple[float, int]]) -> str:
    """Two bars a stage, seconds and peak bytes, as an SVG document."""
    most = [max(values) or 1 for values in zip(*measured.values())]
    bars = []
    for row, (stage, values) in enumerate(measured.items()):
        bars.append(f'<text x="8" y="{40 * row + 32}">{stage}</text>')
        labels = (f"{values[0]:.2f} s", format_bytes(values[1]))
        for k, (value, largest, label, color) in enumerate(zip(values, most, labels, ("#2b6cb0", "#dd6b20"))):
            y, length = 40 * row + 12 + 16 * k, 1 + 300 * value / largest
            bars.append(f'<rect x="90" y="{y}" width="{length:.1f}" height="13" fill="{color}"/>')
            bars.append(f'<text x="{96 + length:.1f}" y="{y + 11}">{label}</text>')
    size = f'width="500" height="{40 * len(measured) + 16}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *bars, "</svg>"])
