# Generated from notebooks/source/10_pipeline.py by `course export`.
# Do not edit: change the chapter and export again.

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffusion_engine.rectified_flow import predict_data
from diffusion_engine.scheduler import SOLVERS, Schedule


def initial_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """x⁽ⁱ⁾ ~ N(0, 1) from seed i alone: bit-identical however pictures are batched.

    Args:
        seeds: 64-bit integers 0 … 2**64 − 1, one a sample. Below 2**32 they feed torch's CPU generator, which reads
            no more than 32 bits; above, NumPy's.
        shape: of one sample, such as (C, H, W) or (C, T, H, W).

    Returns:
        (B, *shape), fp32, on the CPU.

    Raises:
        ValueError: a seed that is no 64-bit integer.
    """
    noise = torch.empty(len(seeds), *shape)
    for row, seed in zip(noise, seeds):
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed!r} is not a 64-bit integer (0 to 2**64 - 1); try 0")
        if seed < 2**32:
            row.copy_(torch.randn(*shape, generator=torch.Generator().manual_seed(int(seed))))
        else:
            row.copy_(torch.from_numpy(np.random.default_rng(int(seed)).standard_normal(tuple(shape), np.float32)))
    return noise


class StepInfo(NamedTuple):
    """What a callback sees after each step. Clone what you keep: a later pipeline may reuse the buffers."""

    step: int  # steps taken so far, 1 … N
    sigma: float  # noise level of ``latents``
    latents: Tensor
    data: Tensor  # x̂0, the preview that this step's velocity gives


class State(NamedTuple):
    """Where the loop stands: all that is needed to go on, bit for bit."""

    latents: Tensor
    step: int
    history: tuple
    cancelled: bool


class NotFiniteError(ArithmeticError):
    """A stage gave NaN or infinity; the message names the stage."""


def require_finite(value: Any, stage: str) -> Any:
    """``value`` itself, if all floating tensors in it (tuples and lists are looked into) are finite.

    A finite sum proves every number finite without a mask as large as the tensor.

    Raises:
        NotFiniteError: names ``stage``.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() and not math.isfinite(value.sum()) and not bool(value.isfinite().all()):
            raise NotFiniteError(f"{stage} gave NaN or infinity; try float32, a smaller guidance, or intact weights")
    elif isinstance(value, (tuple, list)):
        for part in value:
            require_finite(part, stage)
    return value


Velocity = Callable[[Tensor, float], Tensor]
Callback = Callable[[StepInfo], Any]


def _says_no(answer: Any) -> bool:
    """False, as Python, NumPy or torch write it, and nothing else."""
    if isinstance(answer, Tensor):
        return answer.dtype == torch.bool and not answer.any()
    return isinstance(answer, (bool, np.bool_)) and not answer


@torch.no_grad()
def denoise(
    velocity: Velocity,
    noise: Tensor,
    schedule: Schedule,
    solver: str | Callable = "euler",
    callback: Callback | None = None,
    start: int = 0,
    history: tuple = (),
    buffer: Any = None,
) -> State:
    """Walk the ODE dx/dσ = v(x, σ) down the schedule: for each (σ, σ_next) one solver step.

    Args:
        velocity: v(x (B, …), σ) → (B, …); guidance is already inside.
        noise: latents at the first σ, or, to go on, a cancelled `State`'s latents.
        callback: called after each step with a `StepInfo`; returning False (NumPy's or torch's, too) cancels.
        start, history: a cancelled `State`'s step and history; the rest then equals an uninterrupted run, bit for bit.
        buffer: a pair of latents to walk in (load(x) fills ``front``; each step writes ``back``, then swap()), so that
            no step allocates any. The same bits; a callback's latents live until the step after next.

    Raises:
        ValueError: unknown solver, ``start`` outside 0 … N, a velocity not shaped like the latents.
        NotFiniteError: names the step.
    """
    if not callable(solver) and solver not in SOLVERS:
        raise ValueError(f"solver {solver!r} is unknown; try one of {', '.join(SOLVERS)}")
    walk = solver if callable(solver) else SOLVERS[solver]
    if not 0 <= start <= schedule.num_steps:
        raise ValueError(f"start {start} is outside 0 … {schedule.num_steps}, the steps of this schedule; try 0")
    x, count = noise if buffer is None else buffer.load(noise), schedule.num_steps
    for k, (sigma, sigma_next) in list(enumerate(schedule, 1))[start:]:
        step = walk(velocity, x, sigma, sigma_next, history, None if buffer is None else buffer.back)
        if step.velocity.shape != x.shape:
            raise ValueError(f"velocity has shape {tuple(step.velocity.shape)}; expected {tuple(x.shape)}")
        require_finite(step.latents, f"denoise, step {k} of {count},")
        data = predict_data(x, step.velocity, sigma) if callback is not None else None  # x̂0 = x − σ·v
        x, history = step.latents, step.history
        if buffer is not None:
            buffer.swap()
        answer = None if callback is None else callback(StepInfo(k, sigma_next, x, data))
        if _says_no(answer):
            return State(x if buffer is None else x.clone(), k, history, cancelled=True)
    return State(x if buffer is None else x.clone(), count, history, cancelled=False)


def to_pictures(images: Tensor) -> list[Image.Image]:
    """byte = round(127.5 · x + 127.5), clamped: images (B, 3, H, W) or (B, 1, H, W) in −1 … 1 → B PIL pictures.

    Raises:
        ValueError: another number of channels, or whole numbers.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images have shape {tuple(images.shape)}; expected (B, 3, H, W) or (B, 1, H, W)")
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}; expected floats in −1…1: bytes / 127.5 − 1")
    levels = (images.float().clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
    arrays = levels.permute(0, 2, 3, 1).cpu().numpy()  # (B, H, W, C)
    return [Image.fromarray(np.ascontiguousarray(a[..., 0] if a.shape[-1] == 1 else a)) for a in arrays]


class Stopwatch:
    """A meter: ``with watch("decode"): …`` adds to ``watch.seconds["decode"]``.

    Args:
        synchronize: called before each reading of the clock, so that work queued on a GPU is counted where it belongs.
    """

    def __init__(self, synchronize: Callable[[], Any] = lambda: None):
        self.seconds: dict[str, float] = {}
        self.synchronize = synchronize

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.synchronize()
        begun = time.perf_counter()
        yield
        self.synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun


@dataclass(frozen=True)
class Result:
    """Pictures, and all that is needed to trust, repeat or continue them. A cancelled run has no pictures yet."""

    images: list[Image.Image]
    latents: Tensor  # (B, C, H, W), the last ones
    seeds: tuple[int, ...]
    sigmas: Tensor  # (N + 1,)
    seconds: dict[str, float]  # by stage
    step: int  # steps taken
    history: tuple = ()  # what the solver remembers
    cancelled: bool = False
    request: Any = None  # what was asked for; the engine fills it in
    peak_bytes: dict[str, int] = field(default_factory=dict)  # by stage, when the meter counts bytes
    memory: Any = None  # what an engine's own switches remember of a cancelled run
    origin: str = ""  # the engine that drew it: model and dtype


def generate(
    prompts: Sequence[str],
    seeds: Sequence[int],
    schedule: Schedule,
    *,
    encode: Callable[[Sequence[str]], Any],
    velocity: Callable[[Any], Velocity],
    decode: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    device: torch.device | str = "cpu",
    latents: Tensor | None = None,
    solver: str | Callable = "euler",
    callback: Callback | None = None,
    resume: Result | State | None = None,
    meter: Callable | None = None,
    buffer: Any = None,
) -> Result:
    """prompts → encode → noise → denoise → decode → `Result`, one direction, picture i from prompt i and seed i.

    Args:
        encode: prompts → condition. velocity: condition → v(x, σ), guidance inside. decode: latents → images in −1 … 1.
        shape: of one latent. device: where latents live; noise is drawn on the CPU and moved there.
        latents: the first noise (B, *shape), instead of the seeds'.
        resume: a cancelled result of the same request; the run goes on from its step.
        meter: times a stage, see `Stopwatch`; or counts its bytes. buffer: see `denoise`.

    Raises:
        ValueError: counts or shapes that do not fit. NotFiniteError: names the stage.
    """
    if not prompts or len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts for {len(seeds)} seeds; give one each, and at least one")
    meter = meter or Stopwatch()
    with meter("encode"):
        condition = require_finite(encode(prompts), "encode")
    with meter("noise"):
        x = initial_noise(seeds, shape) if latents is None else latents
        start, history = (resume.step, resume.history) if resume is not None else (0, ())
        x = require_finite(x if resume is None else resume.latents, "noise").to(device)
        if tuple(x.shape) != (len(seeds), *shape):
            raise ValueError(f"latents have shape {tuple(x.shape)}; expected {(len(seeds), *shape)}")
    with meter("denoise"):
        state = denoise(velocity(condition), x, schedule, solver, callback, start, history, buffer)
    images = []
    if not state.cancelled:
        with meter("decode"), torch.no_grad():
            images = to_pictures(require_finite(decode(state.latents), "decode"))
    stages, peaks = dict(getattr(meter, "seconds", {})), dict(getattr(meter, "peak_bytes", {}))
    return Result(images, state.latents, tuple(seeds), schedule.sigmas, stages, *state[1:], peak_bytes=peaks)
