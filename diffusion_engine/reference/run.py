# Generated from notebooks/source/23_run.py by `course export`.
# Do not edit: change the chapter and export again.

import gc
import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion_engine.dit import unpatchify
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import PeakMeter, format_bytes
from diffusion_engine.pipeline import Result, Stopwatch, generate, to_pictures
from diffusion_engine.reference.checkpoint import find_folder, hub_cache, load, read_json
from diffusion_engine.reference.flux import Flux
from diffusion_engine.reference.sana import Sana
from diffusion_engine.reference.sd3 import SD3
from diffusion_engine.scheduler import Schedule
from diffusion_engine.text_conditioning import PromptEmbeds


class Recipe(NamedTuple):
    """What a family's pipeline does around its transformer.

    Args:
        kind: our transformer. pipeline, transformer: diffusers' classes. grid: base grid of its schedule, see `make_schedule`. steps, guidance: its defaults.
        masked: whether the transformer is told which text tokens are padding.
        embedded: guidance is fed to the network, which then runs once a step.
    """

    kind: type
    pipeline: str
    transformer: str
    grid: str
    steps: int
    guidance: float
    masked: bool = False
    embedded: bool = False


RECIPES = {
    "sd3": Recipe(SD3, "StableDiffusion3Pipeline", "SD3Transformer2DModel", "double", 28, 7.0),
    "flux": Recipe(Flux, "FluxPipeline", "FluxTransformer2DModel", "even", 28, 3.5, embedded=True),
    "sana": Recipe(Sana, "SanaPipeline", "SanaTransformer2DModel", "double", 20, 4.5, masked=True),
}

KL = {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "norm_num_groups": 4, "layers_per_block": 1}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
DC = {"latent_channels": 4, "attention_head_dim": 4, "upsample_block_type": "interpolate", "decoder_act_fns": "silu"}
for side in ("encoder", "decoder"):
    DC |= {f"{side}_block_types": "ResBlock", f"{side}_block_out_channels": (8, 8, 8)}
    DC |= {f"{side}_layers_per_block": (1, 1, 1), f"{side}_qkv_multiscales": ((), (), ())}

TINY = {  # family → our config's entries, the VAE's class and entries, the scheduler's entries
    "sd3": (
        {"sample_size": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 4}
        | {"out_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 24, "caption_projection_dim": 64}
        | {"pos_embed_max_size": 12, "qk_norm": "rms_norm", "dual_attention_layers": [0]},
        ("AutoencoderKL", KL | {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
        {"shift": 3.0},
    ),
    "flux": (
        {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "guidance_embeds": True}
        | {
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 24,
            "axes_dims_rope": [4, 6, 6],
        },
        ("AutoencoderKL", KL | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
        {"use_dynamic_shifting": True},
    ),
    "sana": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}
        | {"num_cross_attention_heads": 3, "cross_attention_head_dim": 16, "cross_attention_dim": 48}
        | {"caption_channels": 24, "sample_size": 8},
        ("AutoencoderDC", DC | {"scaling_factor": 0.41407}),
        {"shift": 3.0},
    ),
}


def write_tiny(name: str, folder: str | Path, seed: int = 0) -> Path:
    """A pipeline folder as diffusers writes it, of a few thousand random weights and without text encoders.

    Raises:
        ValueError: an unknown family.
    """
    if name not in TINY:
        raise ValueError(f"family {name!r} is unknown; try {', '.join(TINY)}")
    import diffusers

    sizes, (vae_kind, vae_sizes), scheduling = TINY[name]
    kind = getattr(diffusers, RECIPES[name].pipeline)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = getattr(diffusers, RECIPES[name].transformer)(**sizes)
        vae = getattr(diffusers, vae_kind)(**vae_sizes)
        for weight in net.requires_grad_(False).parameters():  # a fresh one has zeros, which hide faults
            weight.copy_(torch.randn(weight.shape) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    made = {"transformer": net, "vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**scheduling)}
    names = [p.name for p in inspect.signature(kind).parameters.values() if p.default in (p.empty, None)]
    kind(**dict.fromkeys(names) | made).save_pretrained(folder)
    return Path(folder)


class Parts:
    """The parts of a pipeline's folder, each loaded when it is first asked for.

    Args:
        folder: as diffusers' ``save_pretrained`` writes it. name: of the family.
        device, dtype: of every part. offload: let the others go when another is asked for, so that the largest part
            decides how much memory is needed, and not the sum.
    """

    def __init__(self, folder: Path, name: str, device="cpu", dtype=torch.float32, offload: bool = False):
        self.folder, self.name, self.device, self.dtype, self.offload = Path(folder), name, device, dtype, offload
        self.has_encoders = (self.folder / "text_encoder").is_dir()
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
            return load(RECIPES[self.name].kind, self.folder / "transformer", self.device, self.dtype)
        if part == "encoders":
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

    diffusers.utils.logging.disable_progress_bar()
    kind = getattr(diffusers, RECIPES[parts.name].pipeline)
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


def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """Latents (B, C, h, w) → images (B, 3, H, W) in −1 … 1: vae.decode(latents / scale + shift)."""
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    return vae.decode((latents / vae.config.scaling_factor + shift).to(vae.dtype), return_dict=False)[0].float()


def encode_prompt(pipe: Any, name: str, prompt: str, negative: str, device) -> tuple[PromptEmbeds, PromptEmbeds | None]:
    """Prompt and negative prompt through the pipeline's own text encoders."""
    if name == "sd3":
        text, no_text, pooled, no_pooled = pipe.encode_prompt(prompt, None, None, device, negative_prompt=negative)
        return words(text, None, pooled), words(no_text, None, no_pooled)
    if name == "flux":
        text, pooled, _ = pipe.encode_prompt(prompt, None, device)
        return words(text, None, pooled), None
    text, mask, no_text, no_mask = pipe.encode_prompt(prompt, True, negative, device=device)
    return words(text, mask), words(no_text, no_mask)


def words(text: Tensor, mask: Tensor | None = None, pooled: Tensor | None = None) -> PromptEmbeds:
    """`PromptEmbeds` with every token real, or with nothing pooled, where a family has no use for it."""
    mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask.bool()
    return PromptEmbeds(text, mask, text[:, 0, :0] if pooled is None else pooled)


def drawn_prompt(model: nn.Module, text: str, tokens: int = 7) -> PromptEmbeds:
    """Embeddings drawn from the text's hash, for a folder without text encoders: the data flow is real, the words not."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    rng, config = torch.Generator().manual_seed(seed), model.config
    width = getattr(config, "joint_attention_dim", None) or config.caption_channels
    pooled = getattr(config, "pooled_projection_dim", 0)
    return words(torch.randn(1, tokens, width, generator=rng), None, torch.randn(1, pooled, generator=rng))


@dataclass(frozen=True)
class Order:
    """What is asked for; None takes the family's own."""

    prompt: str = "a red apple"
    negative: str = ""
    seed: int = 0
    steps: int | None = None
    guidance: float | None = None
    height: int = 1024
    width: int = 1024

    def within(self, recipe: Recipe) -> "Order":
        """The same with the recipe's steps and guidance where none were given."""
        return replace(
            self,
            steps=recipe.steps if self.steps is None else self.steps,
            guidance=recipe.guidance if self.guidance is None else self.guidance,
        )


def latent_shape(folder: Path, name: str, height: int, width: int) -> tuple[int, int, int, int]:
    """(C, h, w) of the latents, and the patch: what the configurations of transformer and VAE say.

    Raises:
        ValueError: a side that is no multiple of what the family draws.
    """
    config, vae = (read_json(folder / part / "config.json") for part in ("transformer", "vae"))
    packed = 2 if name == "flux" else 1
    factor = 2 ** (len(vae.get("block_out_channels") or vae["encoder_block_out_channels"]) - 1)
    unit = factor * packed * config["patch_size"]
    for side, pixels in (("height", height), ("width", width)):
        if pixels < unit or pixels % unit:
            raise ValueError(f"{side} {pixels} is not a multiple of {unit}; try {max(1, round(pixels / unit)) * unit}")
    return config["in_channels"] // packed**2, height // factor, width // factor, packed * config["patch_size"]


def encode(parts: Parts, prompts: tuple[str, str]) -> tuple[PromptEmbeds, PromptEmbeds | None]:
    """Prompt and negative prompt, by the folder's text encoders or, where it has none, by `drawn_prompt`."""
    if parts.has_encoders:
        return encode_prompt(parts.get("encoders"), parts.name, *prompts, parts.device)
    drawn = [drawn_prompt(parts.get("transformer"), text) for text in prompts]
    return tuple(PromptEmbeds(*(x.to(parts.device, x.dtype) for x in side)) for side in drawn)


def network(parts: Parts, guidance: float) -> Callable[[Tensor, Tensor, PromptEmbeds], Tensor]:
    """The transformer as chapter 08 calls it: (x, t, prompt) → velocity, fp32 outside, ``parts.dtype`` inside."""
    masked = RECIPES[parts.name].masked

    def model(x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        net = parts.get("transformer")
        embedded = getattr(net, "guidance_in", None) is not None
        extra = {"guidance": torch.full((len(x),), guidance, device=x.device)} if embedded else {}
        text, pooled = prompt.tokens.to(parts.dtype), prompt.pooled.to(parts.dtype)
        return net(x.to(parts.dtype), t, text, prompt.mask if masked else None, pooled, **extra).float()

    return model


def draw(parts: Parts, order: Order, meter: Callable | None = None, callback: Callable | None = None) -> Result:
    """Chapter 10's loop on a real family: our transformer, schedule and guidance, the borrowed encoders and VAE.

    Raises:
        ValueError: a size that the family cannot draw, or a scheduler that is not followed.
    """
    recipe = RECIPES[parts.name]
    order = order.within(recipe)
    *shape, patch = latent_shape(parts.folder, parts.name, order.height, order.width)
    tokens = shape[1] * shape[2] // patch**2
    schedule = Schedule.from_config(parts.folder / "scheduler", order.steps, num_tokens=tokens, grid=recipe.grid)

    def velocity(condition: tuple[PromptEmbeds, PromptEmbeds | None]) -> Callable:
        scale = 1.0 if recipe.embedded else order.guidance
        return guided_velocity(network(parts, order.guidance), *condition, scale)

    stages = {"encode": lambda prompts: encode(parts, (prompts[0], order.negative)), "velocity": velocity}
    stages |= {
        "decode": lambda latents: decode(parts.get("vae"), latents),
        "shape": shape,
        "device": parts.device,
        "meter": meter,
        "callback": callback,
    }
    return generate([order.prompt], [order.seed], schedule, **stages)


def draw_theirs(parts: Parts, order: Order) -> tuple[Tensor, list]:
    """The same order through diffusers' pipeline and diffusers' transformer: latents (1, C, h, w) and pictures."""
    order, name, pipe = order.within(RECIPES[parts.name]), parts.name, borrow_pipeline(parts)
    cond, uncond = encode(parts, (order.prompt, order.negative))
    asked = {"prompt_embeds": cond.tokens.to(parts.dtype), "pooled_prompt_embeds": cond.pooled.to(parts.dtype)}
    asked |= {"prompt_attention_mask": cond.mask.long()} if name == "sana" else {}
    if name != "flux":
        asked["negative_prompt_embeds"] = uncond.tokens.to(parts.dtype)
        asked["negative_pooled_prompt_embeds"] = uncond.pooled.to(parts.dtype)
    if name == "sana":
        asked = {key: value for key, value in asked.items() if "pooled" not in key}
        asked |= {"negative_prompt_attention_mask": uncond.mask.long(), "use_resolution_binning": False}
        asked["negative_prompt"] = None
    sizes = {"height": order.height, "width": order.width, "num_inference_steps": order.steps}
    rng = torch.Generator().manual_seed(order.seed)
    latents = pipe(**asked, **sizes, guidance_scale=order.guidance, generator=rng, output_type="latent").images
    if name == "flux":
        c, h, w, patch = latent_shape(parts.folder, name, order.height, order.width)
        latents = unpatchify(latents, patch, (h // patch, w // patch), channels_first=True)
    with torch.no_grad():
        return latents.float(), to_pictures(decode(pipe.vae, latents.float()))


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


class Facts(NamedTuple):
    """What is published of a family: its hub id and licence, sizes in billions of weights, D, and bytes a pixel decodes to.

    ``factor``: pixels a token has a side; ``frames``: frames a token covers (0 for pictures).
    """

    hub: str
    licence: str
    transformer: float
    encoders: float
    vae: float
    width: int
    factor: int
    frames: int = 0


FACTS = {
    "sd3": Facts("stabilityai/stable-diffusion-3.5-medium", "Stability Community, gated", 2.24, 5.6, 0.08, 1536, 16),
    "flux": Facts("black-forest-labs/FLUX.1-dev", "FLUX.1 dev non-commercial, gated", 11.9, 4.9, 0.08, 3072, 16),
    "sana": Facts("Efficient-Large-Model/Sana_1600M_1024px_diffusers", "NSCL v2-custom", 1.6, 2.6, 0.31, 2240, 32),
}


def needs(facts: Facts, height: int, width: int, batch: int = 2, itemsize: int = 2) -> Need:
    """Bytes by formula: weights · itemsize; denoise B · s · 12 · D · N; decode 3 maps of 256 channels at full size.

    Args:
        batch: samples a forward, 2 with batched guidance. itemsize: s, 2 for bf16.
    """
    billion = [round(1e9 * size) * itemsize for size in (facts.encoders, facts.transformer, facts.vae)]
    tokens = height * width // facts.factor**2
    return Need(*billion, batch * itemsize * 12 * facts.width * tokens, 3 * 256 * height * width * itemsize)


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


def list_families(height: int = 1024, width: int = 1024, device: str = "cpu") -> list[dict[str, str]]:
    """One row a family: weights here or where, licence, bytes by formula, the verdict on this machine."""
    rows = []
    for name, facts in FACTS.items():
        try:
            found = str(find_folder(facts.hub).parent)
        except ValueError:
            found = ""
        need = needs(facts, height, width)
        row = {"family": name, "weights": found or f"none; get {facts.hub} with --download", "licence": facts.licence}
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
