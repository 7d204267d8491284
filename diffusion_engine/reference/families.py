"""What each family's pipeline does around its transformer: rules, sizes and licences, one class a family.

Chapter 24 has one loop for all of them and asks here for what differs: how the text encoders are called, which road is
walked, how latents lie, what stands between latents and VAE. diffusers and transformers are borrowed for text encoders and
VAEs, and imported when one of them is first needed.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion_engine.dit import unpatchify
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.reference.checkpoint import read_config, read_json
from diffusion_engine.reference.cogvideox import CogVideoX
from diffusion_engine.reference.flux import Flux
from diffusion_engine.reference.hunyuan_video import HunyuanVideo
from diffusion_engine.reference.ltx import LTX
from diffusion_engine.reference.sana import Sana
from diffusion_engine.reference.sd3 import SD3
from diffusion_engine.reference.solvers import (
    DDIM,
    Road,
    nearest_steps,
    read_road,
    straight_schedule,
    straighten,
    told_times,
)
from diffusion_engine.reference.wan import Wan
from diffusion_engine.scheduler import Schedule, euler_step
from diffusion_engine.text_conditioning import PromptEmbeds


class Facts(NamedTuple):
    """What is published of a family: hub id, licence, billions of weights (counted in ``notes/models.json``), width D.

    ``side``, ``frames``: pixels and frames that a token covers. ``decoded``: frames that the VAE decodes at once (0: all).
    """

    hub: str
    licence: str
    transformer: float
    encoders: float
    vae: float
    width: int
    side: int = 16
    frames: int = 1
    decoded: int = 1


def words(text: Tensor, mask: Tensor | None = None, pooled: Tensor | None = None) -> PromptEmbeds:
    """`PromptEmbeds` with every token real, or with nothing pooled, where a family has no use for it."""
    mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask.bool()
    return PromptEmbeds(text, mask, text[:, 0, :0] if pooled is None else pooled)


class Family:
    """Defaults that hold for most; a subclass says what is otherwise.

    Attributes:
        kind: our transformer. pipeline, transformer, vae: diffusers' classes. grid: base grid of the schedule, see
            `make_schedule`. steps, guidance, height, width, frames: what the pipeline takes when nothing is said.
        masked: the transformer is told which text tokens are padding.
        embedded: guidance is fed to the network, which then runs once a step.
        packed: latents a side that the pipeline folds into one before the transformer sees them.
        fps: frames a second of a clip. settings: what diffusers' pipeline must be told besides, to do the same.
    """

    kind: type
    pipeline: str
    transformer: str
    vae: str
    scheduler = "FlowMatchEulerDiscreteScheduler"
    facts: Facts
    grid = "even"
    steps, guidance = 50, 5.0
    height, width, frames = 1024, 1024, 1
    masked = embedded = False
    packed = 1
    fps = 16
    settings: dict = {}

    @property
    def is_clip(self) -> bool:
        """Whether it draws clips."""
        return self.frames > 1

    def encode(self, pipe: Any, prompt: str, negative: str, device) -> tuple[PromptEmbeds, PromptEmbeds | None]:
        """Prompt and negative prompt through the pipeline's own text encoders."""
        text, no_text = pipe.encode_prompt(prompt, negative, True, device=device)
        return words(text), words(no_text)

    def factors(self, vae: dict) -> tuple[int, int]:
        """(frames, pixels a side) that one latent covers, from the VAE's configuration."""
        return 1, 2 ** (len(vae.get("block_out_channels") or vae["encoder_block_out_channels"]) - 1)

    def road(self, folder, steps: int, tokens: int) -> Road:
        """The schedule and the solver that the folder's ``scheduler_config.json`` asks for."""
        return read_road(folder / "scheduler", steps, tokens, self.grid)

    def network(self, net: Callable, folder, schedule: Schedule) -> Callable:
        """The transformer as a velocity, asked with t = 1000 · σ and told the schedule's own times."""
        return told_times(net, schedule)

    def times(self, folder, schedule: Schedule) -> Tensor:
        """What the transformer is told as time at each step (N,)."""
        return schedule.timesteps

    def extra(self, net: nn.Module, x: Tensor, guidance: float, vae: dict) -> dict:
        """What the network needs beyond latents, time and text."""
        if not getattr(net.config, "guidance_embeds", False):
            return {}
        return {"guidance": torch.full((len(x),), guidance, device=x.device)}

    def noise(self, seed: int, shape: tuple[int, ...]) -> Tensor:
        """(1, *shape), drawn in the order of the pipeline."""
        return initial_noise([seed], shape)

    def unpacked(self, latents: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What the pipeline returns as latents, laid out as ours, (1, *shape)."""
        return latents

    def raw(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Latents as the VAE made them: latents / scale + shift."""
        return latents / vae.config.scaling_factor + (getattr(vae.config, "shift_factor", None) or 0.0)

    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Latents of one picture or clip → images (frames, 3, H, W) in −1 … 1."""
        images = vae.decode(self.raw(vae, latents).to(vae.dtype), return_dict=False)[0].float()
        return images[0].transpose(0, 1) if self.is_clip else images


class SD3Family(Family):
    """Three text encoders, two of which also give a pooled vector."""

    kind, pipeline = SD3, "StableDiffusion3Pipeline"
    transformer, vae = "SD3Transformer2DModel", "AutoencoderKL"
    facts = Facts("stabilityai/stable-diffusion-3.5-medium", "Stability AI Community, gated", 2.243, 5.581, 0.084, 1536)
    grid, steps, guidance = "double", 28, 7.0

    def encode(self, pipe, prompt, negative, device):
        text, no_text, pooled, no_pooled = pipe.encode_prompt(prompt, None, None, device, negative_prompt=negative)
        return words(text, None, pooled), words(no_text, None, no_pooled)


class FluxFamily(Family):
    """Guidance is an input; latents are folded 2 × 2 into tokens before the transformer sees them."""

    kind, pipeline = Flux, "FluxPipeline"
    transformer, vae = "FluxTransformer2DModel", "AutoencoderKL"
    facts = Facts("black-forest-labs/FLUX.1-dev", "FLUX.1 [dev] Non-Commercial, gated", 11.901, 4.886, 0.084, 3072)
    steps, guidance, embedded, packed = 28, 3.5, True, 2

    def encode(self, pipe, prompt, negative, device):
        text, pooled, _ = pipe.encode_prompt(prompt, None, device)
        return words(text, None, pooled), None

    def unpacked(self, latents, shape):
        return unpatchify(latents, 2, (shape[1] // 2, shape[2] // 2), channels_first=True)


class SanaFamily(Family):
    """One language model reads the text; the network is told which tokens are padding."""

    kind, pipeline = Sana, "SanaPipeline"
    transformer, vae = "SanaTransformer2DModel", "AutoencoderDC"
    scheduler = "DPMSolverMultistepScheduler"
    facts = Facts(
        "Efficient-Large-Model/Sana_1600M_1024px_diffusers", "NSCL v2-custom", 1.604, 2.614, 0.312, 2240, side=32
    )
    grid, steps, guidance, masked = "double", 20, 4.5, True
    settings = {"use_resolution_binning": False}

    def encode(self, pipe, prompt, negative, device):
        call = inspect.signature(
            type(pipe).__call__
        ).parameters  # where diffusers keeps the words put before the prompt
        told = {"complex_human_instruction": call["complex_human_instruction"].default}
        text, mask, no_text, no_mask = pipe.encode_prompt(prompt, True, negative, device=device, **told)
        return words(text, mask), words(no_text, no_mask)


class WanFamily(Family):
    """Clips; text is padded with zeros that the network does read; latents keep a mean and a spread a channel."""

    kind, pipeline = Wan, "WanPipeline"
    transformer, vae = "WanTransformer3DModel", "AutoencoderKLWan"
    scheduler = "UniPCMultistepScheduler"
    facts = Facts("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Apache-2.0", 1.419, 5.681, 0.127, 1536, frames=4, decoded=4)
    grid, height, width, frames = "double", 480, 832, 81

    def encode(self, pipe, prompt, negative, device):
        text, no_text = pipe.encode_prompt(prompt, negative, True, max_sequence_length=512, device=device)
        return words(text), words(no_text)

    def factors(self, vae):
        return vae.get("scale_factor_temporal") or 4, vae.get("scale_factor_spatial") or 8

    def raw(self, vae, latents):
        mean, std = (latents.new_tensor(vae.config[f"latents_{x}"]).reshape(-1, 1, 1, 1) for x in ("mean", "std"))
        return latents * std + mean


class LTXFamily(Family):
    """Clips; the pipeline keeps latents as a row of tokens; places are told in seconds and pixels."""

    kind, pipeline = LTX, "LTXPipeline"
    transformer, vae = "LTXVideoTransformer3DModel", "AutoencoderKLLTXVideo"
    facts = Facts(
        "Lightricks/LTX-Video",
        "OpenRAIL-M (0.9.5); later ones: see the model page",
        1.923,
        4.762,
        0.419,
        2048,
        side=32,
        frames=8,
        decoded=0,
    )
    guidance, masked, fps = 3.0, True, 25
    settings = {"frame_rate": fps}
    height, width, frames = 512, 704, 161

    def encode(self, pipe, prompt, negative, device):
        text, mask, no_text, no_mask = pipe.encode_prompt(prompt, negative, True, device=device)
        return words(text, mask), words(no_text, no_mask)

    def factors(self, vae):
        halved, patch = vae["spatio_temporal_scaling"], vae.get("patch_size", 4)
        return vae.get("patch_size_t", 1) * 2 ** sum(halved), patch * 2 ** sum(halved)

    def extra(self, net, x, guidance, vae):
        return {"frame_rate": float(self.fps), "compression": self.factors(vae)}

    def unpacked(self, latents, shape):
        return latents.mT.unflatten(2, shape[1:])

    def raw(self, vae, latents):
        mean, std = (x.to(latents).reshape(-1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
        return latents * std / vae.config.scaling_factor + mean

    def decode(self, vae, latents):
        clean = {"temb": latents.new_zeros(1)} if vae.config.timestep_conditioning else {}
        return (
            vae.decode(self.raw(vae, latents).to(vae.dtype), **clean, return_dict=False)[0].float()[0].transpose(0, 1)
        )


class CogVideoXFamily(Family):
    """Clips; it predicts v on a DDIM road, which chapter 23 straightens; the pipeline puts frames before channels."""

    kind, pipeline = CogVideoX, "CogVideoXPipeline"
    transformer, vae = "CogVideoXTransformer3DModel", "AutoencoderKLCogVideoX"
    scheduler = "CogVideoXDDIMScheduler"
    facts = Facts("zai-org/CogVideoX-5b", "CogVideoX License", 5.57, 4.762, 0.216, 3072, frames=4, decoded=8)
    guidance, fps = 6.0, 8
    height, width, frames = 480, 720, 49

    def factors(self, vae):
        return int(vae.get("temporal_compression_ratio") or 4), 2 ** (len(vae["block_out_channels"]) - 1)

    def ddim(self, folder) -> DDIM:
        """The folder's scheduler."""
        values = read_json(folder / "scheduler" / "scheduler_config.json")
        if (found := values.get("_class_name")) != self.scheduler:
            raise ValueError(f"scheduler {found} is not followed for this family; try {self.scheduler}")
        return read_config(DDIM, values)

    def road(self, folder, steps, tokens):
        return Road(straight_schedule(self.ddim(folder), steps), euler_step)

    def network(self, net, folder, schedule):
        return straighten(net, self.ddim(folder))

    def times(self, folder, schedule):
        return nearest_steps(self.ddim(folder), schedule.sigmas[:-1])

    def noise(self, seed, shape):
        c, t, h, w = shape
        return initial_noise([seed], (t, c, h, w)).transpose(1, 2)

    def unpacked(self, latents, shape):
        return latents.transpose(1, 2)


class HunyuanVideoFamily(Family):
    """Clips; a language model reads the text through a template, CLIP gives the pooled vector; guidance is an input."""

    kind, pipeline = HunyuanVideo, "HunyuanVideoPipeline"
    transformer, vae = "HunyuanVideoTransformer3DModel", "AutoencoderKLHunyuanVideo"
    facts = Facts(
        "hunyuanvideo-community/HunyuanVideo",
        "Tencent Hunyuan Community",
        *(12.821, 7.629, 0.246, 3072),
        frames=4,
        decoded=0,
    )
    guidance, masked, embedded, fps = 6.0, True, True, 15
    height, width, frames = 720, 1280, 129

    def encode(self, pipe, prompt, negative, device):
        text, pooled, mask = pipe.encode_prompt(prompt, device=device)
        return words(text, mask, pooled), None

    def factors(self, vae):
        return vae.get("temporal_compression_ratio") or 4, vae.get("spatial_compression_ratio") or 8


FAMILIES: dict[str, Family] = {
    "sd3": SD3Family(),
    "flux": FluxFamily(),
    "sana": SanaFamily(),
    "wan": WanFamily(),
    "ltx": LTXFamily(),
    "cogvideox": CogVideoXFamily(),
    "hunyuan_video": HunyuanVideoFamily(),
}
