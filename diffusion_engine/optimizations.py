# Generated from notebooks/source/13_optimizations.py by `course export`.
# Do not edit: change the chapter and export again.

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from operator import call
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffusion_engine.attention import CrossAttention
from diffusion_engine.dit import Conditions, DiT, DiTConfig, flop_count, parameter_count, patch_grid, sincos_2d
from diffusion_engine.text_conditioning import PromptEmbeds
from diffusion_engine.transformer_block import JointBlock, Mod


class Timing(NamedTuple):
    """Seconds of repeated runs: median, smallest, largest, and all of them in the order of measuring."""

    median: float
    low: float
    high: float
    every: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Timing":
        """The summary of some numbers."""
        return cls(statistics.median(values), min(values), max(values), tuple(values))

    def __str__(self) -> str:
        unit, factor = ("s", 1) if self.median >= 1 else ("ms", 1e3)
        return f"{self.median * factor:.3g} {unit} ({self.low * factor:.3g} … {self.high * factor:.3g})"


def measure(
    *runs: Callable[[], Any], repeats: int = 7, warmup: int = 2, synchronize: Callable[[], Any] = lambda: None
) -> list[Timing]:
    """Time several runs in turn, A B C A B C …, so that a busy moment of the machine hits all of them alike.

    Args:
        repeats: rounds that count, 1 or more. warmup: rounds before them that do not.
        synchronize: called before each reading of the clock, so that work queued on a GPU is counted where it belongs.

    Raises:
        ValueError: no round that counts.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"{repeats} repeats after {warmup} rounds of warm-up measure nothing; try 5 and 1")
    seconds = [[] for _ in runs]
    for turn in range(-warmup, repeats):
        for run, kept in zip(runs, seconds):
            synchronize()
            begun = time.perf_counter()
            run()
            synchronize()
            if turn >= 0:
                kept.append(time.perf_counter() - begun)
    return [Timing.of(kept) for kept in seconds]


def ratio(ours: Timing, other: Timing) -> Timing:
    """ours / other, round by round: the spread of the quotient, not the quotient of two medians."""
    return Timing.of([a / b for a, b in zip(ours.every, other.every, strict=True)])


def amdahl(share: float, factor: float) -> float:
    """How much faster the whole gets, 1 / (1 − p + p/k), when a share p of its time gets k times faster.

    Args:
        share: p, in 0…1. factor: k > 0; infinity removes the part.

    Raises:
        ValueError: a share outside 0…1, or a factor that is not positive.

    Source: Amdahl 1967.
    """
    if not 0 <= share <= 1 or not factor > 0:
        raise ValueError(f"share {share} with factor {factor}: a share lies in 0…1, a factor is positive; try 0.5, 2.0")
    rest = 1 - share + share / factor
    return 1 / rest if rest else math.inf


def roofline(intensity: float, peak: float, bandwidth: float) -> float:
    """FLOP/s that a machine can reach at best: min(P, I · W); the two meet at the ridge, I = P / W.

    Args:
        intensity: I, operations for each byte moved. peak: P, FLOP/s of large matrix products.
        bandwidth: W, bytes a second.

    Source: Williams et al. 2009.
    """
    return min(peak, intensity * bandwidth)


def weight_intensity(
    config: DiTConfig, grid: tuple[int, int], text_tokens: int, batch: int = 1, itemsize: int = 4
) -> float:
    """Operations that one forward of a `DiT` does for each byte of its weights, which it must read once.

    Args:
        config, grid, text_tokens, batch: as in `flop_count`. itemsize: bytes a weight.
    """
    return flop_count(config, grid, text_tokens, batch) / (parameter_count(config) * itemsize)


def by_step(knobs: Any, steps: int) -> list:
    """Knobs made for S · B samples at once, step after step, as S times those of B; nested in any way, None stays None."""
    if knobs is None or isinstance(knobs, Tensor):
        return [None] * steps if knobs is None else list(knobs.unflatten(0, (steps, -1)).unbind(0))
    rows = zip(*(by_step(part, steps) for part in knobs))
    return [type(knobs)(*row) if isinstance(knobs, Mod) else type(knobs)(row) for row in rows]


def hoist(dit: DiT, grid: tuple[int, int], sigmas: Tensor, prompt: PromptEmbeds) -> list[Conditions]:
    """What `DiT.velocity` reads besides the latents, for every noise level of a schedule at once; equal to 1e-5.

    One product a layer, (S · B, D) × (D, its knobs), steers a block at every step; text tokens and positions are made once;
    a mask that hides nothing is dropped. The knobs take S · B · (all knobs) numbers.

    Args:
        grid: of image tokens. sigmas: (S,). prompt: the B prompts of one forward.

    Returns:
        S × `Conditions`.
    """
    cond = (dit.time_in(1000 * sigmas.float())[:, None] + dit.pooled_in(prompt.pooled)).flatten(0, 1)  # (S · B, D)
    joint = [(block.image_modulation(cond), block.text_modulation(cond)) for block in dit.joint_blocks]
    knobs = [*joint, *(block.modulation(cond) for block in dit.parallel_blocks), dit.final.knobs(cond)]
    text, mask = dit.text_in(prompt.tokens), None if bool(prompt.mask.all()) else prompt.mask
    positions = sincos_2d(grid, dit.config.width).to(text)
    return [Conditions(text, mask, positions, row) for row in by_step(knobs, len(sigmas))]


def hoist_text(cross: CrossAttention, text: Tensor) -> Callable[..., Tensor]:
    """The same cross-attention with keys and values of text (B, M, Dt) made once: called as (x, text_mask, chunk)."""
    keys, values = cross.keys_values(text)
    return lambda x, text_mask=None, chunk=None: cross.attend(x, keys, values, text_mask, chunk)


class PromptTable:
    """prompt → value, found by the prompt's numbers: guidance stacks its prompts anew at each step."""

    def __init__(self):
        self.rows: list[tuple[PromptEmbeds, Any]] = []

    def get(self, prompt: PromptEmbeds, make: Callable[[], Any]) -> Any:
        """The value that make() gave when this prompt was first met."""
        for known, value in self.rows:
            if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(known, prompt)):
                return value
        self.rows.append((prompt, make()))
        return self.rows[-1][1]


class Memory:
    """What a step cache keeps of one prompt: the first block's last change, and up to two (t, change by the rest)."""

    def __init__(self):
        self.first: Tensor | None = None
        self.rest: list[tuple[float, Tensor]] = []

    def is_near(self, change: Tensor, threshold: float) -> bool:
        """Whether mean |change − first| < threshold · mean |first| in every sample."""
        if self.first is None:
            return False
        apart, size = (y.flatten(1).float().abs().mean(1) for y in (change - self.first, self.first))
        return bool((apart < threshold * size).all())

    def keep(self, t: float, first: Tensor, rest: Tensor) -> None:
        """A full forward at time t: the first block moved the tokens by ``first``, the others by ``rest``."""
        self.first, self.rest = first, [*self.rest[-1:], (t, rest)]

    def guess(self, t: float, forecast: bool) -> Tensor:
        """The change by the rest at time t: the last one, or, with ``forecast``, on the line through the last two."""
        t1, last = self.rest[-1]
        if not forecast or len(self.rest) < 2:
            return last
        t0, before = self.rest[0]
        return torch.lerp(before, last, (t - t0) / (t1 - t0)) if t1 != t0 else last


class StepCache:
    """First-block cache of *one* run: while the first block does what it did, the other blocks are guessed.

    Below ``threshold``, a relative change that every sample of the batch must keep, a forward costs one block. At 0 every
    forward is full: same bits.

    Args:
        threshold: 0 or more; published settings lie near 0.1.
        forecast: go on along the line through the last two full forwards, instead of repeating the last.

    Attributes:
        full, reused: forwards of each kind so far.

    Raises:
        ValueError: a threshold that is negative or not finite.

    Source: ParaAttention's first-block cache; Liu et al. 2025 (TaylorSeer) for the forecast.
    """

    def __init__(self, threshold: float, forecast: bool = True):
        if not 0 <= threshold < math.inf:
            raise ValueError(f"step cache threshold {threshold} is not a number from 0 up; try 0.1, or 0 for none")
        self.threshold, self.forecast = threshold, forecast
        self.full, self.reused, self.memories = 0, 0, PromptTable()

    def runner(self, prompt: PromptEmbeds, t: float, blocks: int, run_block: Callable = call) -> Callable:
        """A ``run_block`` for one forward of ``blocks`` blocks at time t; what has to run goes through ``run_block``."""
        memory, place, near, first, after = self.memories.get(prompt, Memory), 0, False, None, None

        def run(block: nn.Module, x: Tensor, *rest: Any) -> Any:
            nonlocal place, near, first, after
            place += 1
            untouched = (x, rest[0]) if isinstance(block, JointBlock) else x
            out = untouched if near else run_block(block, x, *rest)
            tokens = out[0] if isinstance(out, tuple) else out
            if place == 1:
                first, after = tokens - x, tokens
                near = memory.is_near(first, self.threshold)
                self.full, self.reused = self.full + (not near), self.reused + near
            if place < blocks:
                return out
            if near:
                moved = after + memory.guess(t, self.forecast)
                return (moved, rest[0]) if isinstance(out, tuple) else moved
            memory.keep(t, first, tokens[:, : after.shape[1]] - after)
            return out

        return run


class Accelerated:
    """model(x, t, prompt) for `guided_velocity`: a `DiT` with the switches of one run; make a new one for each run.

    Args:
        sigmas: of the schedule, to `hoist`; None works everything out at each step.
        cache: a `StepCache` of this run. chunk: see `attention`.
        run_block: how a block is run, see `DiT.forward`; `compiled_blocks` for example.

    Raises:
        ValueError: at the call: a time that is not in ``sigmas``.
    """

    def __init__(
        self,
        dit: DiT,
        sigmas: Tensor | None = None,
        cache: StepCache | None = None,
        chunk: int | None = None,
        run_block: Callable = call,
    ):
        self.dit, self.sigmas, self.cache, self.chunk, self.run_block = dit, sigmas, cache, chunk, run_block
        self.hoisted = PromptTable()

    def __call__(self, x: Tensor, t: Tensor, prompt: PromptEmbeds) -> Tensor:
        x, run_block = x.to(prompt.tokens.dtype), self.run_block
        if self.cache is not None:
            blocks = len(self.dit.joint_blocks) + len(self.dit.parallel_blocks)
            run_block = self.cache.runner(prompt, float(t[0]), blocks, run_block)
        if self.sigmas is None:
            return self.dit(x, t, *prompt, self.chunk, run_block).float()
        steps = self.hoisted.get(prompt, lambda: self._ahead(x, prompt))
        if float(t[0]) not in steps:
            raise ValueError(f"t = {float(t[0]):g} is not a time of this schedule; try one of {list(steps)[:3]} …")
        return self.dit.velocity(x, steps[float(t[0])], self.chunk, run_block).float()

    def _ahead(self, x: Tensor, prompt: PromptEmbeds) -> dict[float, Conditions]:
        grid = patch_grid(*x.shape[-2:], self.dit.config.patch)
        return dict(zip((1000 * self.sigmas).tolist(), hoist(self.dit, grid, self.sigmas.to(x.device), prompt)))


def compiled_blocks(compiler: Callable = torch.compile) -> Callable:
    """A ``run_block`` that runs each kind of block compiled; equal up to rounding, the first calls are slow.

    Args:
        compiler: forward → its compiled form.

    Raises:
        ValueError: torch.compile finds no C++ compiler on this machine.
    """
    names = (os.environ.get("CXX") or "g++", "clang++", "cl")
    if compiler is torch.compile and not any(shutil.which(name) for name in names):
        raise ValueError(
            f"compiling needs a C++ compiler, none of {', '.join(names)} is here; install g++ or leave it off"
        )
    kinds: dict[type, Callable] = {}

    def run(block: nn.Module, *arguments: Any) -> Any:
        kind = type(block)
        if kind not in kinds:
            kinds[kind] = compiler(kind.forward)
        return kinds[kind](block, *arguments)

    return run


HALVES = (torch.bfloat16, torch.float16)
PRODUCTS = (F.linear, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.baddbmm)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for products of such numbers; True for fp32."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype not in checks or bool(getattr(torch.ops.mkldnn, checks[dtype])())


class Upcast(TorchFunctionMode):
    """``with Upcast():`` layers and products of bf16 or fp16 on the CPU are computed in fp32 and rounded once.

    Weights stay as small as they are; one layer at a time, and what it reads and gives, is widened while it runs.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS or args[0].dtype not in HALVES or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        widen = lambda x: x.float() if isinstance(x, Tensor) else x  # noqa: E731
        return func(*map(widen, args), **{key: widen(x) for key, x in kwargs.items()}).to(args[0].dtype)
