"""Text to image: the chapters' parts put together. Nothing is computed here."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from diffusion_engine import __version__
from diffusion_engine.files import (
    DEVICES,
    DTYPES,
    RECORD,
    SHIPPED_MODEL,
    Model,
    Request,
    load_model,
    make_request,
    one_of,
    recommended,
    shown,
    size_rule,
)
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import Callback, Result, Stopwatch, Velocity, generate, to_pictures
from diffusion_engine.scheduler import make_schedule
from diffusion_engine.text_conditioning import PromptCache, PromptEmbeds, stack_prompts


class EngineWarning(UserWarning):
    """The picture is drawn, but part of what was asked has no effect."""


def available_devices() -> list[str]:
    """This machine's devices, fastest first; the CPU is always there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [name for name, found in there.items() if found]


def choose_device(name: str = "auto") -> str:
    """A device of this machine; ``auto`` is cuda, else mps, else cpu.

    Raises:
        ValueError: an unknown name, or a device that is not there.
    """
    one_of("device", name, DEVICES)
    here = available_devices()
    if name == "auto":
        return here[0]
    if name not in here:
        raise ValueError(f"device {name} is not available on this machine; try {' or '.join(here)}")
    return name


class TextToImage:
    """Prompt → picture. Holds weights and a prompt cache, nothing of any run: threads may share one engine.

    Args:
        model: what `load_model` gives, already on ``device`` in ``dtype``.

    Attributes:
        dit, vae, text_encoder, tokenizer: the parts. config: the model folder's. guidance_scale, shift: recommended.
    """

    def __init__(self, model: Model, device: str = "cpu", dtype: str = "float32"):
        self.dit, self.vae, self.text_encoder, self.tokenizer, self.config, self.fingerprint = model
        self.device, self.dtype = device, dtype
        best = recommended(self.config)
        self.guidance_scale, self.shift = best["guidance_scale"], best["shift"]
        self.prompt_cache = PromptCache()

    @classmethod
    def from_pretrained(
        cls, path: str | Path | None = None, device: str = "auto", dtype: str = "float32"
    ) -> "TextToImage":
        """An engine from a model folder; None is the model that ships with the package. Nothing is ever downloaded.

        Args:
            device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
            dtype: ``float32``, ``bfloat16`` or ``float16``, of weights and activations; latents are always fp32.

        Raises:
            ValueError: unknown device or dtype; a damaged model folder (see `load_model`).
        """
        one_of("dtype", dtype, DTYPES)
        device = choose_device(device)
        return cls(load_model(SHIPPED_MODEL if path is None else path, device, dtype), device, dtype)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_inference_steps: int = 28,
        guidance_scale: float | None = None,
        seed: int = 0,
        num_images_per_prompt: int = 1,
        latents: Tensor | None = None,
        callback: Callback | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        solver: str = "euler",
        shift: float | None = None,
        resume: Result | None = None,
    ) -> Result:
        """Draw. Picture i of the batch, prompt 0's pictures first, uses ``seed + i``.

        Args:
            prompt: one or several. negative_prompt: what to steer away from; one for all, or one each.
            num_inference_steps: 1 … 1,000. guidance_scale: w ≥ 0, recommended when None; 1 is "just the prompt".
            seed: a 64-bit integer. num_images_per_prompt: 1 … 1,000.
            latents: the first noise (B, C, H/f, W/f) instead of the seeds'.
            callback: gets a `StepInfo` after each step; returning False cancels.
            height, width: pixels; multiples of what the model draws. solver: ``euler``, ``heun``, ``multistep``.
            shift: of the schedule, recommended when None.
            resume: a cancelled `Result`; the run goes on with its settings, equal to uninterrupted. Give nothing else
                but a callback.

        Raises:
            ValueError: an argument outside its range. NotFiniteError: a stage gave NaN.

        Warns:
            EngineWarning: words that did not fit the encoder's window; a negative prompt at guidance ≤ 1.
        """
        given = {
            "negative_prompt": negative_prompt,
            "num_inference_steps": num_inference_steps,
            "guidance_scale": guidance_scale,
            "seed": seed,
            "num_images_per_prompt": num_images_per_prompt,
            "height": height,
            "width": width,
            "solver": solver,
            "shift": shift,
        }
        if resume is None:
            request = make_request(
                self.config, () if prompt is None else prompt, **given, given_latents=latents is not None
            )
            return self.draw(request, callback, latents)
        defaults = {"num_inference_steps": 28, "seed": 0, "num_images_per_prompt": 1, "solver": "euler"}
        asked = {"prompt": prompt, "latents": latents, **given}
        if extra := [name for name, value in asked.items() if value is not None and value != defaults.get(name)]:
            raise ValueError(
                f"{', '.join(extra)} given with resume; a resumed run keeps its settings, give only a callback"
            )
        if not isinstance(resume, Result) or not isinstance(resume.request, Request):
            raise ValueError(
                f"resume is {shown(type(resume).__name__)}; expected the Result of a cancelled run of an engine"
            )
        return self.draw(resume.request, callback, resume=resume)

    def draw(
        self,
        request: Request,
        callback: Callback | None = None,
        latents: Tensor | None = None,
        resume: Result | None = None,
    ) -> Result:
        """Draw what a `Request` says; see `__call__`."""
        self._warn(request)
        result = generate(
            request.every_prompt,
            request.seeds,
            make_schedule(request.num_inference_steps, shift=request.shift),
            encode=lambda prompts: (self.encode(prompts), self.encode(request.every_negative)),
            velocity=lambda condition: self.velocity(*condition, request.guidance_scale),
            decode=self._decode,
            shape=self.latent_shape(request.height, request.width),
            device=self.device,
            latents=self._given(latents),
            solver=request.solver,
            callback=callback,
            resume=resume,
            meter=Stopwatch(self._synchronize),
        )
        for index, image in enumerate(result.images):
            image.info[RECORD] = json.dumps(self.record(request, index), ensure_ascii=False)
        return replace(result, request=request)

    # The stages, each also of use alone

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> PromptEmbeds:
        """Each prompt encoded alone, or taken from the cache, then stacked."""
        return stack_prompts([self.prompt_cache.get(prompt, lambda p=prompt: self._encode(p)) for prompt in prompts])

    def velocity(self, cond: PromptEmbeds, uncond: PromptEmbeds, guidance_scale: float) -> Velocity:
        """v(x, σ) of the guided network."""
        return guided_velocity(self._network, cond, uncond, guidance_scale)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> list[Image]:
        """Latents (B, C, h, w), a callback's preview for example, as pictures."""
        return to_pictures(self._decode(latents))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of one picture's latents."""
        factor = self.vae.config.factor
        return self.vae.config.latent_channels, height // factor, width // factor

    def record(self, request: Request, index: int) -> dict:
        """What the PNG of picture ``index`` will say."""
        return {
            "request": asdict(request),
            "index": index,
            "model": self.fingerprint,
            "engine": __version__,
            "torch": torch.__version__,
            "device": self.device,
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
        }

    def __repr__(self) -> str:
        multiple, low, high = size_rule(self.config)
        sizes = f"sides {low} … {high} in steps of {multiple}"
        return f"TextToImage({self.fingerprint}, {self.device}, {self.dtype}, {sizes})"

    def _encode(self, prompt: str) -> PromptEmbeds:
        tokens = self.tokenizer(prompt)
        return self.text_encoder(tokens.ids.to(self.device), tokens.mask.to(self.device))

    def _network(self, x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        return self.dit(x.to(prompt.tokens.dtype), t, prompt.tokens, prompt.mask, prompt.pooled).float()

    def _decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents.to(self.device, getattr(torch, self.dtype))).float()

    def _given(self, latents) -> Tensor | None:
        if latents is None:
            return None
        if not isinstance(latents, Tensor) or not latents.is_floating_point():
            raise ValueError(
                f"latents are {shown(getattr(latents, 'dtype', type(latents).__name__))}; expected a float tensor"
            )
        return latents.detach().float()

    def _synchronize(self) -> None:
        if self.device != "cpu":
            getattr(torch, self.device).synchronize()

    def _warn(self, request: Request) -> None:
        """Say what will have no effect."""
        guidance = request.guidance_scale
        for kind, prompts in (("prompt", request.prompts), ("negative prompt", request.negative_prompts)):
            for prompt in dict.fromkeys(prompts):
                if dropped := self.tokenizer(prompt).dropped[0]:
                    room = f"the encoder's window of {self.tokenizer.max_length} tokens"
                    warnings.warn(f"{kind} is longer than {room}; dropped: {dropped!r}", EngineWarning, stacklevel=4)
        if guidance <= 1 and any(request.negative_prompts):
            why = "that is the prompt alone" if guidance == 1 else "below 1 it even draws the picture towards itself"
            message = f"negative prompt does nothing at guidance {guidance:g}: {why}; try {self.guidance_scale:g}"
            warnings.warn(message, EngineWarning, stacklevel=4)
