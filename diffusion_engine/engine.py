"""Text to image: the chapters' parts put together. Nothing is computed here."""

import copy
import json
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from operator import call
from pathlib import Path
from typing import NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor

from diffusion_engine import __version__
from diffusion_engine.files import RECORD
from diffusion_engine.guidance import Model as Network
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import LatentBuffer, PeakMeter, Plan, plan_memory, planned_decode, weight_bytes
from diffusion_engine.model_folder import (
    CLIP_WEIGHTS,
    SHIPPED_CLIP_MODEL,
    SHIPPED_MODEL,
    Model,
    check_clip_folder,
    clip_fingerprint,
    load_model,
    load_part,
)
from diffusion_engine.optimizations import Accelerated, StepCache, compiled_blocks
from diffusion_engine.pipeline import Callback, Result, Stopwatch, Velocity, generate, require_finite, to_pictures
from diffusion_engine.request import (
    DEVICES,
    DTYPES,
    Request,
    Switches,
    check_size,
    make_request,
    one_of,
    recommended,
    shown,
    size_rule,
)
from diffusion_engine.scheduler import Schedule, make_schedule
from diffusion_engine.text_conditioning import PromptCache, PromptEmbeds, TextEncoderConfig, stack_prompts
from diffusion_engine.video import TextRefiner, VideoDiT, VideoDiTConfig, VideoVAE, VideoVAEConfig, latent_frames


class EngineWarning(UserWarning):
    """The picture is drawn, but part of what was asked has no effect."""


def ends(text: str, most: int = 120) -> str:
    """A long text's beginning and end, as a message quotes it."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


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
        switches: what a call uses unless it says otherwise.

    Attributes:
        dit, vae, text_encoder, tokenizer: the parts. config: the model folder's. guidance_scale, shift: recommended.
    """

    def __init__(self, model: Model, device: str = "cpu", dtype: str = "float32", switches: Switches = Switches()):
        self.dit, self.vae, self.text_encoder, self.tokenizer, self.config, self.fingerprint = model
        self.device, self.dtype, self.switches = device, dtype, switches
        best = recommended(self.config)
        self.guidance_scale, self.shift = best["guidance_scale"], best["shift"]
        self.prompt_cache = PromptCache()

    @classmethod
    def from_pretrained(
        cls, path: str | Path | None = None, device: str = "auto", dtype: str = "float32", **switches
    ) -> "TextToImage":
        """An engine from a model folder; None is the model that ships with the package. Nothing is ever downloaded.

        Args:
            device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
            dtype: ``float32``, ``bfloat16`` or ``float16``, of weights and activations; latents are always fp32.
            switches: `Switches` by name, for every call that does not say otherwise.

        Raises:
            ValueError: unknown device, dtype or switch; a damaged model folder (see `load_model`).
        """
        one_of("dtype", dtype, DTYPES)
        device, chosen = choose_device(device), Switches.of(switches)
        return cls(load_model(SHIPPED_MODEL if path is None else path, device, dtype), device, dtype, chosen)

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
        memory_budget: int | str | None = None,
        profile: bool = False,
        **switches,
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
            memory_budget: ``"2 GB"`` or bytes: the switches that fit are chosen by `plan`.
            profile: count bytes instead of time: ``peak_bytes`` of the result has each stage's peak above the weights.
            switches: `Switches` by name, ``hoist=True`` or ``step_cache=0.1``: how it is computed.

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
            chosen, prompts = Switches.of(switches, self.switches), () if prompt is None else prompt
            given |= {"given_latents": latents is not None, "switches": chosen}
            request = make_request(self.config, prompts, **given)
            if memory_budget is not None:
                request = self.within(request, self.plan(request, memory_budget))
            return self.draw(request, callback, latents, profile=profile)
        defaults = {"num_inference_steps": 28, "seed": 0, "num_images_per_prompt": 1, "solver": "euler"}
        asked = {"prompt": prompt, "latents": latents, "memory_budget": memory_budget, **given, **switches}
        if extra := [name for name, value in asked.items() if value is not None and value != defaults.get(name)]:
            raise ValueError(
                f"{', '.join(extra)} given with resume; a resumed run keeps its settings, give only a callback"
            )
        if not isinstance(resume, Result) or not isinstance(resume.request, Request):
            raise ValueError(
                f"resume is {shown(type(resume).__name__)}; expected the Result of a cancelled run of an engine"
            )
        if resume.origin != self.origin:
            raise ValueError(
                f"resume is a run of {resume.origin}, this engine is {self.origin}; resume it where it began"
            )
        return self.draw(resume.request, callback, resume=resume, profile=profile)

    def draw(
        self,
        request: Request,
        callback: Callback | None = None,
        latents: Tensor | None = None,
        resume: Result | None = None,
        profile: bool = False,
    ) -> Result:
        """Draw what a `Request` says; see `__call__`."""
        self._check(request)
        switches, schedule = request.switches, make_schedule(request.num_inference_steps, shift=request.shift)
        cache = None if switches.step_cache is None else StepCache(switches.step_cache)
        if resume is not None and resume.memory is not None:
            cache = copy.deepcopy(resume.memory)  # so that a result can be resumed twice
        network = self.network(schedule, switches, cache)
        shape = self.latent_shape(request.height, request.width)
        parts = self.dit, self.vae, self.text_encoder
        result = generate(
            request.every_prompt,
            request.seeds,
            schedule,
            encode=lambda prompts: tuple(self.encode(p, switches) for p in (prompts, request.every_negative)),
            velocity=lambda condition: self.velocity(*condition, request.guidance_scale, network, schedule, switches),
            decode=lambda z: self._decode(z, switches),
            shape=shape,
            device=self.device,
            latents=self._given(latents),
            solver=request.solver,
            callback=callback,
            resume=resume,
            meter=PeakMeter(*parts, device=self.device) if profile else Stopwatch(self._synchronize),
            buffer=LatentBuffer((len(request.seeds), *shape), device=self.device) if switches.latent_buffer else None,
        )
        for index, image in enumerate(result.images):
            image.info[RECORD] = json.dumps(self.record(request, index), ensure_ascii=False)
        return replace(result, request=request, memory=cache if result.cancelled else None, origin=self.origin)

    def plan(self, request: Request, memory_budget: int | str) -> Plan:
        """The fastest way to draw a request below a budget of bytes, ``"2 GB"`` for example; ``str(plan)`` tells why.

        Raises:
            ValueError: no size, or one that nothing fits in; names the smallest that is enough.
        """
        lengths = [self.tokenizer(text).ids.shape[1] for text in (*request.prompts, *request.negative_prompts, "")]
        return plan_memory(
            memory_budget,
            self.dit.config,
            self.vae.config,
            height=request.height,
            width=request.width,
            text_tokens=max(lengths),
            batch=len(request.seeds),
            weights=weight_bytes(self.dit, self.vae, self.text_encoder),
            itemsize=getattr(torch, self.dtype).itemsize,
            guided=request.guidance_scale != 1,
        )

    def within(self, request: Request, plan: Plan) -> Request:
        """The same request, computed as the plan says."""
        names = ["batched_cfg", "attention_chunk", "vae_batch", "vae_tile"]
        if plan.vae_tile is not None:
            names.append("vae_overlap")
        return replace(request, switches=Switches.of({n: getattr(plan, n) for n in names}, request.switches))

    # The stages, each also of use alone

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], switches: Switches = Switches()) -> PromptEmbeds:
        """Each prompt encoded alone, or taken from the cache, then stacked."""
        cache = self.prompt_cache if switches.prompt_cache else PromptCache(0)
        return stack_prompts([cache.get(prompt, lambda p=prompt: self._encode(p)) for prompt in prompts])

    def network(
        self, schedule: Schedule | None = None, switches: Switches = Switches(), cache: StepCache | None = None
    ) -> Network:
        """The DiT as guidance calls it, (x, t, prompt) → v; with a step cache, or hoisting over a schedule: for one run."""
        sigmas = schedule.sigmas if switches.hoist and schedule is not None else None
        run_block = self._compiled_blocks if switches.compile else call
        return Accelerated(self.dit, sigmas, cache, switches.attention_chunk, run_block)

    def velocity(
        self,
        cond: PromptEmbeds,
        uncond: PromptEmbeds,
        guidance_scale: float,
        network: Network | None = None,
        schedule: Schedule | None = None,
        switches: Switches = Switches(),
    ) -> Velocity:
        """v(x, σ) of the guided network."""
        silent = schedule.values[switches.zero_steps] if switches.zero_steps and schedule is not None else None
        return guided_velocity(
            network or self.network(schedule, switches),
            cond,
            uncond,
            guidance_scale,
            batched=switches.batched_cfg,
            interval=switches.guidance_interval,
            rescale=switches.guidance_rescale,
            zero_star=switches.cfg_zero_star,
            zero_above=silent,
        )

    @torch.no_grad()
    def decode(self, latents: Tensor) -> list[Image]:
        """Latents (B, C, h, w), a callback's preview for example, as pictures."""
        return to_pictures(require_finite(self._decode(latents), "decode"))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of one picture's latents."""
        factor = self.vae.config.factor
        return self.vae.config.latent_channels, height // factor, width // factor

    @property
    def origin(self) -> str:
        """Which model in which dtype: what a run must share with the run that it resumes."""
        return f"model {self.fingerprint} in {self.dtype}"

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

    @cached_property
    def _compiled_blocks(self):
        return compiled_blocks()

    def _decode(self, latents: Tensor, switches: Switches = Switches()) -> Tensor:
        return planned_decode(self.vae, latents.to(self.device, getattr(torch, self.dtype)), switches).float()

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

    def _check(self, request: Request) -> None:
        """Refuse a size that the model cannot draw; say what will have no effect."""
        for name in ("height", "width"):
            check_size(name, getattr(request, name), *size_rule(self.config))
        self._warn(request)

    def _warn(self, request: Request) -> None:
        """Say what will have no effect."""
        guidance = request.guidance_scale
        for kind, prompts in (("prompt", request.prompts), ("negative prompt", request.negative_prompts)):
            for prompt in dict.fromkeys(prompts):
                if dropped := self.tokenizer(prompt).dropped[0]:
                    room = f"the encoder's window of {self.tokenizer.max_length} tokens"
                    warnings.warn(
                        f"{kind} is longer than {room}; dropped: {ends(dropped)!r}", EngineWarning, stacklevel=5
                    )
        if guidance <= 1 and any(request.negative_prompts):
            why = "that is the prompt alone" if guidance == 1 else "below 1 it even draws the picture towards itself"
            message = f"negative prompt does nothing at guidance {guidance:g}: {why}; try {self.guidance_scale:g}"
            warnings.warn(message, EngineWarning, stacklevel=5)


# Text to clip


class ClipModel(NamedTuple):
    """What a clip model's folder holds, with the text encoder and tokenizer that it was trained over, ready to run."""

    dit: object
    vae: object
    refiner: object
    text_encoder: object
    tokenizer: object
    config: dict
    fingerprint: str  # first 16 hex digits over all file hashes, the text files' included


def load_clip_model(path: str | Path | None = None, device: str = "cpu", dtype: str = "float32") -> ClipModel:
    """Load a clip model's folder and the picture model's text parts; every shape and every hash is checked.

    Args:
        path: the folder; None is the model that ships with the package. device, dtype: see `load_model`.

    Raises:
        ValueError: a missing, truncated, wrong-shaped, foreign or altered file; the message names it.
    """
    folder = SHIPPED_CLIP_MODEL if path is None else Path(path)
    config, pictures = check_clip_folder(folder), load_model(None, device, dtype)
    kinds = {"dit": (VideoDiT, VideoDiTConfig), "vae": (VideoVAE, VideoVAEConfig)}
    kinds |= {"refiner": (TextRefiner, TextEncoderConfig)}
    parts = {part: load_part(folder, CLIP_WEIGHTS[part], part, *kinds[part], config, device, dtype) for part in kinds}
    text = {"text_encoder": pictures.text_encoder, "tokenizer": pictures.tokenizer}
    return ClipModel(**parts, **text, config=config, fingerprint=clip_fingerprint(config))


@dataclass(frozen=True)
class ClipResult(Result):
    """A `Result` whose ``images`` are all frames, clip 0's first; ``peak_bytes`` is filled in beside ``seconds``."""

    frames: int = 1

    @property
    def clips(self) -> list[list[Image]]:
        """The frames of each clip."""
        return [self.images[i : i + self.frames] for i in range(0, len(self.images), self.frames)]


class Meters:
    """A stopwatch and, where there is one, a meter of bytes, as one meter."""

    def __init__(self, watch: Stopwatch, peaks: PeakMeter | None):
        self.meters = [watch] if peaks is None else [watch, peaks]
        self.seconds, self.peak_bytes = watch.seconds, {} if peaks is None else peaks.peak_bytes

    @contextmanager
    def __call__(self, stage: str):
        with ExitStack() as stack:
            for meter in self.meters:
                stack.enter_context(meter(stage))
            yield


class TextToVideo(TextToImage):
    """Prompt → clip. As `TextToImage`, over latents (B, C, F, h, w); threads may share one engine.

    Args:
        model: what `load_clip_model` gives. switches: those of guidance and memory; what rebuilds the picture model's
            network or decoder (attention_chunk, vae_tile, hoist, compile, step_cache) is refused.
    """

    REFUSED = ("attention_chunk", "vae_tile", "hoist", "compile", "step_cache")

    def __init__(self, model: ClipModel, device: str = "cpu", dtype: str = "float32", switches: Switches = Switches()):
        pictures = Model(model.dit, model.vae, model.text_encoder, model.tokenizer, model.config, model.fingerprint)
        super().__init__(pictures, device, dtype, switches)
        self.refiner = model.refiner

    @classmethod
    def from_pretrained(
        cls, path: str | Path | None = None, device: str = "auto", dtype: str = "float32", **switches
    ) -> "TextToVideo":
        """An engine from a clip model's folder; None is the one that ships. Nothing is ever downloaded."""
        one_of("dtype", dtype, DTYPES)
        device, chosen = choose_device(device), Switches.of(switches)
        return cls(load_clip_model(path, device, dtype), device, dtype, chosen)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_inference_steps: int = 28,
        guidance_scale: float | None = None,
        seed: int = 0,
        num_videos_per_prompt: int = 1,
        latents: Tensor | None = None,
        callback: Callback | None = None,
        *,
        frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        solver: str = "euler",
        shift: float | None = None,
        **switches,
    ) -> ClipResult:
        """Draw clips; clip i of the batch, prompt 0's first, uses ``seed + i``. Arguments as `TextToImage` takes them.

        Args:
            frames: 4k + 1; 1 gives a picture. The model was trained on what it recommends.
            latents: the first noise (B, C, 1 + (frames − 1) / 4, height / 4, width / 4).

        Raises:
            ValueError: an argument outside its range. NotFiniteError: a stage gave NaN.
        """
        request = make_request(
            self.config,
            () if prompt is None else prompt,
            negative_prompt,
            num_inference_steps,
            guidance_scale,
            seed,
            num_videos_per_prompt,
            height,
            width,
            solver,
            shift,
            given_latents=latents is not None,
            switches=Switches.of(switches, self.switches),
            frames=frames,
        )
        return self.draw(request, callback, latents)

    def draw(
        self,
        request: Request,
        callback: Callback | None = None,
        latents: Tensor | None = None,
        resume: Result | None = None,
        profile: bool = True,
    ) -> ClipResult:
        """Draw what a `Request` says; ``profile`` counts bytes beside time."""
        self._check(request)
        switches, schedule = request.switches, make_schedule(request.num_inference_steps, shift=request.shift)
        if refused := [name for name in self.REFUSED if getattr(switches, name) != getattr(Switches(), name)]:
            raise ValueError(f"{', '.join(refused)} is a switch of the picture model; leave it out for clips")
        parts = self.dit, self.vae, self.text_encoder, self.refiner
        peaks = PeakMeter(*parts, device=self.device) if profile else None
        shape = self.latent_shape(request.height, request.width, request.frames)
        result = generate(
            request.every_prompt,
            request.seeds,
            schedule,
            encode=lambda prompts: tuple(self.encode(p, switches) for p in (prompts, request.every_negative)),
            velocity=lambda condition: self.velocity(
                *condition, request.guidance_scale, self._clip_network, schedule, switches
            ),
            decode=self._decode,
            shape=shape,
            device=self.device,
            latents=self._given(latents),
            solver=request.solver,
            callback=callback,
            resume=resume,
            meter=Meters(Stopwatch(self._synchronize), peaks),
            buffer=LatentBuffer((len(request.seeds), *shape), device=self.device) if switches.latent_buffer else None,
        )
        told = {field.name: getattr(result, field.name) for field in fields(result)} | {
            "request": request,
            "origin": self.origin,
        }
        drawn = ClipResult(**told, frames=request.frames)
        for index, clip in enumerate(drawn.clips):
            record = self.record(request, index) | {"kind": "clip"}
            clip[0].info[RECORD] = json.dumps(record, ensure_ascii=False)
        return drawn

    @torch.no_grad()
    def decode(self, latents: Tensor) -> list[list[Image]]:
        """Latents (B, C, F, h, w), a callback's preview for example, as clips."""
        frames = to_pictures(require_finite(self._decode(latents), "decode"))
        count = len(frames) // len(latents)
        return [frames[i : i + count] for i in range(0, len(frames), count)]

    def latent_shape(self, height: int, width: int, frames: int = 17) -> tuple[int, int, int, int]:
        """(C, F, h, w) of one clip's latents."""
        c = self.vae.config
        return c.latent_channels, latent_frames(frames, c.time_factor), height // c.factor, width // c.factor

    def _encode(self, prompt: str) -> PromptEmbeds:
        return self.refiner(super()._encode(prompt))

    def _clip_network(self, x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        return self.dit(x.to(prompt.tokens.dtype), t, *prompt).float()

    def _decode(self, latents: Tensor, switches: Switches = Switches()) -> Tensor:
        clips = self.vae.decode(latents.to(self.device, getattr(torch, self.dtype)))
        return clips.transpose(1, 2).flatten(0, 1).float()  # (B · T, 3, H, W), as pictures are kept
