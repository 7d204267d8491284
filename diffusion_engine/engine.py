"""Text to image: the chapters' parts put together. Nothing is computed here."""

import copy
import json
import math
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from operator import call
from pathlib import Path
from typing import NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor

from diffusion_engine import __version__
from diffusion_engine.clip_memory import plan_video_memory, planned_video_decode
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
from diffusion_engine.optimizations import Accelerated, StepCache, Upcast, compiled_blocks
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
from diffusion_engine.transformer_block import Modulation
from diffusion_engine.video import (
    AcceleratedVideo,
    TextRefiner,
    VideoDiT,
    VideoDiTConfig,
    VideoVAE,
    VideoVAEConfig,
    latent_frames,
)


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
        request = self._request(prompt, given, switches, latents, memory_budget, resume)
        return self.draw(request, callback, latents, resume, profile)

    def _request(self, prompt, given: dict, switches: dict, latents, memory_budget, resume: Result | None) -> Request:
        """What a call asks for: a new request within its budget, or that of the run it resumes."""
        if resume is None:
            settings = {name.replace("videos", "images"): value for name, value in given.items()}
            settings |= {"given_latents": latents is not None, "switches": Switches.of(switches, self.switches)}
            request = make_request(self.config, () if prompt is None else prompt, **settings)
            return request if memory_budget is None else self.within(request, self.plan(request, memory_budget))
        defaults = {"num_inference_steps": 28, "seed": 0, "solver": "euler"}
        defaults |= {"num_images_per_prompt": 1, "num_videos_per_prompt": 1}
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
        return resume.request

    def draw(
        self,
        request: Request,
        callback: Callback | None = None,
        latents: Tensor | None = None,
        resume: Result | None = None,
        profile: bool = False,
    ) -> Result:
        """Draw what a `Request` says; see `__call__`."""
        self._check(request, profile)
        switches, schedule = request.switches, make_schedule(request.num_inference_steps, shift=request.shift)
        cache = None if switches.step_cache is None else StepCache(switches.step_cache)
        if resume is not None and resume.memory is not None:
            cache = copy.deepcopy(resume.memory)  # so that a result can be resumed twice
        network, shape = self.network(schedule, switches, cache), self._shape(request)
        with Upcast() if switches.upcast else nullcontext():
            result = generate(
                request.every_prompt,
                request.seeds,
                schedule,
                encode=lambda prompts: tuple(self.encode(p, switches) for p in (prompts, request.every_negative)),
                velocity=lambda cond: self.velocity(*cond, request.guidance_scale, network, schedule, switches),
                decode=lambda z: self._decode(z, switches),
                shape=shape,
                device=self.device,
                latents=self._given(latents),
                solver=request.solver,
                callback=callback,
                resume=resume,
                meter=self._meter(profile, switches),
                buffer=LatentBuffer((len(request.seeds), *shape), device=self.device)
                if switches.latent_buffer
                else None,
            )
        result = replace(result, request=request, memory=cache if result.cancelled else None, origin=self.origin)
        return self._signed(result)

    def plan(self, request: Request, memory_budget: int | str) -> Plan:
        """The fastest way to draw a request below a budget of bytes, ``"2 GB"`` for example; ``str(plan)`` tells why.

        Raises:
            ValueError: no size, or one that nothing fits in; names the smallest that is enough.
        """
        lengths = [self.tokenizer(text).ids.shape[1] for text in (*request.prompts, *request.negative_prompts, "")]
        return self._planner(
            memory_budget,
            self.dit.config,
            self.vae.config,
            **{name: getattr(request, name) for name in self._sizes},
            text_tokens=max(lengths),
            batch=len(request.seeds),
            weights=weight_bytes(*self.parts) + self._kept(request, max(lengths)),  # always there
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
        key = lambda prompt: (prompt, "upcast") if switches.upcast else prompt  # noqa: E731, rounded elsewhere
        return stack_prompts([cache.get(key(prompt), lambda p=prompt: self._encode(p)) for prompt in prompts])

    def network(
        self, schedule: Schedule | None = None, switches: Switches = Switches(), cache: StepCache | None = None
    ) -> Network:
        """The DiT as guidance calls it, (x, t, prompt) → v; with a step cache, or hoisting over a schedule: for one run."""
        sigmas = schedule.sigmas if switches.hoist and schedule is not None else None
        run_block = self._compiled_blocks if switches.compile else call
        return self._accelerated(self.dit, sigmas, cache, switches.attention_chunk, run_block)

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
    def parts(self) -> tuple:
        """All that has weights."""
        return self.dit, self.vae, self.text_encoder

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

    # What clips do in another way

    _sizes, _planner, _accelerated = ("height", "width"), staticmethod(plan_memory), Accelerated

    def _shape(self, request: Request) -> tuple[int, ...]:
        return self.latent_shape(*(getattr(request, name) for name in self._sizes))

    def _kept(self, request: Request, text_tokens: int) -> int:
        """Bytes that hoisting and a step cache keep through a run: knobs of every level and text, three maps of tokens."""
        switches, width, patch = request.switches, self.dit.config.width, self.dit.config.patch
        numbers = 0
        if switches.hoist:
            layers = [part.linear for part in self.dit.modules() if isinstance(part, Modulation)]
            knobs = sum(layer.out_features for layer in (*layers, self.dit.final.modulation))
            numbers += (request.num_inference_steps + 1) * knobs + self._hoisted_text * text_tokens * width
        if switches.step_cache is not None:
            patch = math.prod(patch) if isinstance(patch, tuple) else patch**2
            numbers += 3 * math.prod(self._shape(request)[1:]) // patch * width
        sides = 1 + (request.guidance_scale != 1)
        return numbers * sides * len(request.seeds) * getattr(torch, self.dtype).itemsize

    @property
    def _hoisted_text(self) -> int:
        return 1

    def _meter(self, profile: bool, switches: Switches):
        return PeakMeter(*self.parts, device=self.device) if profile else Stopwatch(self._synchronize)

    def _signed(self, result: Result) -> Result:
        """The result with its record in each picture."""
        for index, image in enumerate(result.images):
            image.info[RECORD] = json.dumps(self.record(result.request, index), ensure_ascii=False)
        return result

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

    def _uncompiled(self, switches: Switches) -> bool:
        """Whether counting bytes would undo compiling: watched operation by operation, nothing is compiled."""
        return switches.compile and self.device != "cuda"

    def _check(self, request: Request, profile: bool) -> None:
        """Refuse a size that the model cannot draw; say what will have no effect."""
        for name in ("height", "width"):
            check_size(name, getattr(request, name), *size_rule(self.config))
        self._warn(request, profile)

    def _warn(self, request: Request, profile: bool) -> None:
        """Say what will have no effect."""
        guidance = request.guidance_scale
        for kind, prompts in (("prompt", request.prompts), ("negative prompt", request.negative_prompts)):
            for prompt in dict.fromkeys(prompts):
                if dropped := self.tokenizer(prompt).dropped[0]:
                    room = f"the encoder's window of {self.tokenizer.max_length} tokens"
                    warnings.warn(
                        f"{kind} is longer than {room}; dropped: {ends(dropped)!r}", EngineWarning, stacklevel=5
                    )
        if profile and self._uncompiled(request.switches):
            message = f"compile does nothing while bytes are counted on {self.device}; leave one of the two out"
            warnings.warn(message, EngineWarning, stacklevel=5)
        if request.switches.upcast and (self.dtype == "float32" or self.device != "cpu"):
            message = f"upcast does nothing in {self.dtype} on {self.device}; it is for bfloat16 and float16 on the cpu"
            warnings.warn(message, EngineWarning, stacklevel=5)
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
    """A `Result` whose ``images`` are all frames, clip 0's first; ``peak_bytes`` is filled in beside ``seconds``.

    Where ``compile`` is on, bytes are counted on CUDA alone: elsewhere counting would undo it.
    """

    frames: int = 1

    @property
    def clips(self) -> list[list[Image]]:
        """The frames of each clip."""
        return [self.images[i : i + self.frames] for i in range(0, len(self.images), self.frames)]


class Meters:
    """A stopwatch and a meter of bytes as one meter."""

    def __init__(self, watch: Stopwatch, peaks: PeakMeter):
        self.meters, self.seconds, self.peak_bytes = (watch, peaks), watch.seconds, peaks.peak_bytes

    @contextmanager
    def __call__(self, stage: str):
        with ExitStack() as stack:
            for meter in self.meters:
                stack.enter_context(meter(stage))
            yield


class TextToVideo(TextToImage):
    """Prompt → clip. As `TextToImage`, over latents (B, C, F, h, w); threads may share one engine.

    Args:
        model: what `load_clip_model` gives. switches: all that pictures have; ``vae_batch`` counts clips, and a
            ``vae_tile`` is a cube: at most so many latents high, wide and long.
    """

    _sizes = ("height", "width", "frames")
    _planner, _accelerated = staticmethod(plan_video_memory), AcceleratedVideo

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
        resume: Result | None = None,
        memory_budget: int | str | None = None,
        profile: bool = False,
        **switches,
    ) -> ClipResult:
        """Draw clips; clip i of the batch, prompt 0's first, uses ``seed + i``. Arguments as `TextToImage` takes them.

        Args:
            frames: 4k + 1; 1 gives a picture. The model was trained on what it recommends.
            latents: the first noise (B, C, 1 + (frames − 1) / 4, height / 4, width / 4).
            profile: count bytes and no time; a clip's bytes are always counted, and its time is, too, without it.

        Raises:
            ValueError: an argument outside its range. NotFiniteError: a stage gave NaN.
        """
        given = {
            "negative_prompt": negative_prompt,
            "num_inference_steps": num_inference_steps,
            "guidance_scale": guidance_scale,
            "seed": seed,
            "num_videos_per_prompt": num_videos_per_prompt,
            "frames": frames,
            "height": height,
            "width": width,
            "solver": solver,
            "shift": shift,
        }
        request = self._request(prompt, given, switches, latents, memory_budget, resume)
        return self.draw(request, callback, latents, resume, profile)

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

    @property
    def parts(self) -> tuple:
        return *super().parts, self.refiner

    @property
    def _hoisted_text(self) -> int:
        return 1 + 2 * len(self.dit.blocks)  # keys and values of each

    def _meter(self, profile: bool, switches: Switches):
        watch, peaks = Stopwatch(self._synchronize), PeakMeter(*self.parts, device=self.device)
        return peaks if profile else watch if self._uncompiled(switches) else Meters(watch, peaks)

    def _signed(self, result: Result) -> ClipResult:
        told = {field.name: getattr(result, field.name) for field in fields(result)}
        drawn = ClipResult(**told, frames=result.request.frames)
        for index, clip in enumerate(drawn.clips):
            record = self.record(result.request, index) | {"kind": "clip"}
            clip[0].info[RECORD] = json.dumps(record, ensure_ascii=False)
        return drawn

    def _encode(self, prompt: str) -> PromptEmbeds:
        return self.refiner(super()._encode(prompt))

    def _decode(self, latents: Tensor, switches: Switches = Switches()) -> Tensor:
        clips = planned_video_decode(self.vae, latents.to(self.device, getattr(torch, self.dtype)), switches)
        return clips.transpose(1, 2).flatten(0, 1).float()  # (B · T, 3, H, W), as pictures are kept
