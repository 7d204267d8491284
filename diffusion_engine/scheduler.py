# Generated from notebooks/source/02_scheduler.py by `course export`.
# Do not edit: change the chapter and export again.

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

TRAIN_STEPS = 1000  # the network is fed t = 1000·σ


@dataclass(frozen=True)
class Schedule:
    """N steps through N + 1 falling noise levels, the last of them 0. Immutable; iterating gives (σ, σ_next).

    Attributes:
        values: σ, N + 1 numbers in double precision.
        integer_timesteps: cut the times to whole numbers, as UniPC does.

    Raises:
        ValueError: fewer than two values, values outside 0…1, values that do not fall in fp32, a last value but 0.
    """

    values: tuple[float, ...]
    integer_timesteps: bool = False

    def __post_init__(self):
        object.__setattr__(self, "values", tuple(float(v) for v in self.values))
        if len(self.values) < 2 or self.values[-1] != 0 or not self.values[0] <= 1:
            raise ValueError(f"sigmas {list(self.values)} must begin at 1 or below and end at 0; try (1.0, 0.5, 0.0)")
        for s, s_next in self:
            if not s > s_next:
                raise ValueError(f"sigma {s:g} is followed by {s_next:g}, it must fall; try fewer steps or less shift")

    @property
    def sigmas(self) -> Tensor:
        """The noise levels, (N + 1,), fp32; a fresh tensor each time."""
        return torch.tensor(self.values, dtype=torch.float32)

    @property
    def timesteps(self) -> Tensor:
        """What the network is told, t = 1000·σ, (N,), fp32."""
        if self.integer_timesteps:
            return torch.tensor([math.floor(TRAIN_STEPS * v) for v in self.values[:-1]], dtype=torch.float32)
        return TRAIN_STEPS * self.sigmas[:-1]

    @property
    def num_steps(self) -> int:
        """N."""
        return len(self.values) - 1

    def __iter__(self) -> Iterator[tuple[float, float]]:
        sigmas = self.sigmas.tolist()
        return iter(zip(sigmas[:-1], sigmas[1:]))

    @classmethod
    def from_config(
        cls,
        config: str | Path | dict,
        num_inference_steps: int | None = None,
        num_tokens: int | None = None,
        grid: str = "even",
        sigmas: Sequence[float] | None = None,
    ) -> "Schedule":
        """The schedule that a diffusers ``scheduler_config.json`` describes.

        Args:
            config: the file, the folder that holds it, or its contents.
            num_inference_steps: N, 1…1000; may be left out when ``sigmas`` is given.
            num_tokens: image tokens; needed where the file asks for a dynamic shift, unused elsewhere.
            grid: the base grid, which the file does not tell (a pipeline's code does); see `make_schedule`. UniPC has
                its own.
            sigmas: the base grid itself, instead of ``grid``.

        Raises:
            ValueError: no such file, no JSON, an unknown class or setting, or a setting that this engine does not
                follow.
        """
        return _schedule_from_config(config, num_inference_steps, num_tokens, grid, sigmas)


def shift_sigmas(sigmas: float | Tensor, shift: float) -> float | Tensor:
    """Move σ towards noise, σ' = k·σ / (1 + (k − 1)·σ), so that the odds σ/(1 − σ) grow k-fold; 0 and 1 stay.

    Args:
        sigmas: a number or a tensor of any shape, in 0…1.
        shift: k > 0; above 1, more of the steps are spent at high noise.

    Raises:
        ValueError: ``shift`` is not a positive finite number.

    Source: Esser et al. 2024 (SD3), eq. 23.
    """
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift {shift} is not a positive number; try 1.0 (no shift) or 3.0")
    return shift * sigmas / (shift * sigmas + (1 - sigmas))  # written so, 0 and 1 stay exactly


def dynamic_mu(
    num_tokens: int, base_tokens: int = 256, max_tokens: int = 4096, base_mu: float = 0.5, max_mu: float = 1.15
) -> float:
    """μ on the line through (base_tokens, base_mu) and (max_tokens, max_mu); the shift is k = e^μ.

    Args:
        num_tokens: tokens that the network sees for the picture or clip, at least 1.
        base_tokens, base_mu, max_tokens, max_mu: the line; FLUX's by default. It goes on beyond both ends.

    Raises:
        ValueError: ``num_tokens`` below 1, or a line with one point.

    Source: black-forest-labs/flux, ``sampling.py`` (``get_lin_function``).
    """
    if not num_tokens >= 1 or base_tokens == max_tokens:
        raise ValueError(f"{num_tokens} tokens on a line {base_tokens} … {max_tokens}; try 4096 tokens on 256 … 4096")
    return base_mu + (max_mu - base_mu) / (max_tokens - base_tokens) * (num_tokens - base_tokens)


GRIDS = ("even", "trained", "double", "unipc")


def _base_grid(steps: int, grid: str, shift: float) -> Tensor:
    """Noise levels before the shift, (N,), float64, from 1 down."""
    if grid not in GRIDS:
        raise ValueError(f'grid "{grid}" is unknown; try {", ".join(GRIDS)}')
    steps, smallest = _check_steps(steps), 1 / TRAIN_STEPS
    if grid == "unipc":
        return 1 - torch.arange(steps, dtype=torch.float64) * ((1 - smallest) / steps)
    last = {"even": 1 / steps, "trained": smallest, "double": shift_sigmas(smallest, shift)}[grid]
    return torch.linspace(1, last, steps, dtype=torch.float64)


def _stretch(sigmas: Tensor, terminal: float | None) -> Tensor:
    """Scale the distances from 1 so that the last level is ``terminal``; a lone 1 stays 1."""
    if terminal is not None and not 0 < terminal < 1:
        raise ValueError(f"terminal {terminal} must lie between 0 and 1; try 0.1, or None for no stretch")
    if terminal is None or sigmas[-1] == 1:
        return sigmas
    return 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])


SPACINGS = ("linear", "karras", "exponential", "beta")


def _beta_quantile(u: Tensor, a: float = 0.6) -> Tensor:
    """F⁻¹(u) of Beta(a, a) in float64: ∫₀ˣ (t(1 − t))ᵃ⁻¹ dt = xᵃ Σ_k (1 − a)_k / k! · xᵏ / (a + k), inverted by halving."""
    k = torch.arange(64, dtype=torch.float64)
    weights = torch.cat([k[:1] + 1, ((k[1:] - a) / k[1:]).cumprod(0)]) / (a + k)
    low, high = torch.zeros_like(u), torch.full_like(u, 0.5)  # x ≤ ½; the other half by symmetry
    whole = 2 * 0.5**a * (weights * 0.5**k).sum()
    for _ in range(60):
        x = (low + high) / 2
        below = x**a * (weights * x[:, None] ** k).sum(-1) < whole * torch.minimum(u, 1 - u)
        low, high = torch.where(below, x, low), torch.where(below, high, x)
    return torch.where(u <= 0.5, low, 1 - low)


def _respace(sigmas: Tensor, spacing: str) -> Tensor:
    """Other distances between the first and the last level."""
    first, last = sigmas[0], sigmas[-1]
    u = torch.linspace(0, 1, len(sigmas), dtype=torch.float64)
    if spacing == "karras":
        return torch.lerp(first ** (1 / 7), last ** (1 / 7), u) ** 7
    if spacing == "exponential":
        return torch.lerp(first.log(), last.log(), u).exp()
    if spacing == "beta":
        return torch.lerp(last, first, _beta_quantile(1 - u))
    if spacing == "linear":
        return sigmas
    raise ValueError(f'spacing "{spacing}" is unknown; try {", ".join(SPACINGS)}')


def _check_steps(steps: int) -> int:
    """N as a whole number within 1…1000.

    Raises:
        ValueError: anything else, with the nearest valid count.
    """
    if hasattr(steps, "__index__") and not isinstance(steps, bool) and 1 <= int(steps) <= 1000:
        return int(steps)
    near = 28
    if isinstance(steps, (int, float)) and not math.isnan(min(steps, 1000)):
        near = round(min(max(steps, 1), 1000))
    raise ValueError(f"num_inference_steps {steps!r} is not a whole number within 1…1000; try {near}")


def _given_grid(sigmas: Sequence[float], steps: int | None) -> Tensor:
    """The caller's base grid, checked, (N,), float64."""
    base = torch.as_tensor(sigmas, dtype=torch.float64)
    if base.ndim != 1 or not ((base > 0) & (base <= 1)).all():
        raise ValueError(f"sigmas {base.tolist()} must be numbers in (0, 1]; the 0 at the end is added for you")
    if _check_steps(len(base) if steps is None else steps) != len(base):
        raise ValueError(f"{len(base)} sigmas for {steps} steps; try num_inference_steps={len(base)}")
    return base


def make_schedule(
    num_inference_steps: int | None = None,
    shift: float = 1.0,
    mu: float | None = None,
    terminal: float | None = None,
    spacing: str = "linear",
    grid: str = "even",
    sigmas: Sequence[float] | None = None,
) -> Schedule:
    """Base grid → shift → terminal stretch → spacing → append 0.

    Args:
        num_inference_steps: N, 1…1000; may be left out when ``sigmas`` is given.
        shift: static shift k > 0, see `shift_sigmas`.
        mu: dynamic shift, k = e^μ, instead of ``shift``; see `dynamic_mu`.
        terminal: the last σ before 0, in (0, 1); None leaves it.
        spacing: ``"linear"`` keeps the grid; ``"karras"`` (ρ = 7), ``"exponential"`` and ``"beta"`` (0.6, 0.6) respace it.
        grid: ``"even"`` is 1 … 1/N (FLUX, LTX, HunyuanVideo); ``"trained"`` is 1 … 1/1000; ``"double"`` the same with
            an end already shifted (SD3's own code, diffusers without ``sigmas``); ``"unipc"`` the first N of N + 1
            points 1 … 1/1000, with whole-numbered times and a first σ of 1 − 1e-6 (Wan).
        sigmas: the base grid itself, N falling numbers in (0, 1].

    Returns:
        N + 1 levels; [1, 0] for one step, whatever the options (unless ``sigmas`` begins elsewhere).

    Raises:
        ValueError: a value outside its range; ``shift`` and ``mu`` at once; ``sigmas`` of another length than N.

    Source: diffusers, ``FlowMatchEulerDiscreteScheduler`` and ``UniPCMultistepScheduler``; Karras et al. 2022, eq. 5.
    """
    if mu is not None and (shift != 1.0 or not abs(mu) < 50):
        raise ValueError(
            f"mu {mu} with shift {shift}: try one of them alone; mu lies within ±50 and equals shift = exp(mu)"
        )
    k = shift if mu is None else math.exp(mu)
    base = _base_grid(num_inference_steps, grid, k) if sigmas is None else _given_grid(sigmas, num_inference_steps)
    levels = _respace(_stretch(shift_sigmas(base, k), terminal), spacing)
    if grid == "unipc" and len(levels) > 1:
        levels = levels.clamp_max(1 - 1e-6)  # UniPC's solver takes log(1 − σ)
    return Schedule((*levels.tolist(), 0.0), integer_timesteps=grid == "unipc")


_FOLLOWED = {  # class → the settings that move σ, with diffusers' defaults
    "FlowMatchEulerDiscreteScheduler": {
        **dict(shift=1.0, use_dynamic_shifting=False, base_shift=0.5, max_shift=1.15, time_shift_type="exponential"),
        **dict(base_image_seq_len=256, max_image_seq_len=4096, shift_terminal=None),
        **dict(use_karras_sigmas=False, use_exponential_sigmas=False, use_beta_sigmas=False),
    },
    "UniPCMultistepScheduler": dict(
        flow_shift=1.0, shift_terminal=None, use_flow_sigmas=False, prediction_type="epsilon"
    ),
}
_ONLY = {  # settings of which this engine follows one value
    "FlowMatchEulerDiscreteScheduler": dict(num_train_timesteps=1000, invert_sigmas=False, stochastic_sampling=False),
    "UniPCMultistepScheduler": {
        **dict(num_train_timesteps=1000, use_flow_sigmas=True, prediction_type="flow_prediction", thresholding=False),
        **dict(use_karras_sigmas=False, use_exponential_sigmas=False, use_beta_sigmas=False, sigma_min=None),
        **dict(use_dynamic_shifting=False, time_shift_type="exponential", final_sigmas_type="zero", sigma_max=None),
    },
}
_IDLE = frozenset(  # UniPC's old noise table and its own solver: they do not move a flow's σ
    "beta_start beta_end beta_schedule trained_betas rescale_betas_zero_snr timestep_spacing steps_offset solver_p predict_x0 "
    "solver_order solver_type lower_order_final disable_corrector dynamic_thresholding_ratio sample_max_value".split()
)


def _read_settings(config: str | Path | dict) -> tuple[str, dict]:
    """Class and settings of a scheduler config, every one of them known and of the right kind."""
    if not isinstance(config, dict):
        path = Path(config) / "scheduler_config.json" if Path(config).is_dir() else Path(config)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no readable scheduler_config.json: {error}") from error
    name = config.get("_class_name") if isinstance(config, dict) else None
    if str(name) not in _FOLLOWED:
        raise ValueError(f"scheduler class {name!r} is not supported; try {' or '.join(_FOLLOWED)}")
    followed, only, idle = _FOLLOWED[name], _ONLY[name], _IDLE if name == "UniPCMultistepScheduler" else set()
    settings = followed | {key: value for key, value in config.items() if not key.startswith("_")}
    for key, value in settings.items():
        if key not in followed | only and key not in idle:
            raise ValueError(f"{name} setting {key} is unknown; known are {', '.join(followed | only)}")
        if key in only and value != only[key]:
            raise ValueError(f"{name} with {key} = {value!r} is not supported; only {only[key]!r} is")
        kinds = {bool: (bool,), str: (str,)}.get(type(followed.get(key)), (int, float))
        if key in followed and value != followed[key] and type(value) not in kinds:
            raise ValueError(f"{name} with {key} = {value!r} is not supported; try {followed[key]!r}")
    return name, settings


def _schedule_from_config(config, steps: int | None, num_tokens: int | None, grid: str, sigmas) -> Schedule:
    """See `Schedule.from_config`."""
    name, got = _read_settings(config)
    terminal = got["shift_terminal"] or None
    if name == "UniPCMultistepScheduler":
        return make_schedule(steps, got["flow_shift"], terminal=terminal, grid="unipc", sigmas=sigmas)
    spacing = [key for key in SPACINGS if got.get(f"use_{key}_sigmas")] or ["linear"]
    if len(spacing) > 1:
        raise ValueError(f"the config asks for {' and '.join(spacing)} spacing; set only one of them true")
    shift, kind = got["shift"], got["time_shift_type"]
    if got["use_dynamic_shifting"]:
        if num_tokens is None:
            raise ValueError("the config shifts by picture size; pass num_tokens, 4096 for a 1024×1024 FLUX picture")
        if kind not in ("exponential", "linear"):
            raise ValueError(f'time_shift_type {kind!r} is unknown; try "exponential" or "linear"')
        line = (got[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
        mu = dynamic_mu(num_tokens, *line)
        shift = math.exp(mu) if kind == "exponential" else mu  # "linear" takes μ itself for k
    return make_schedule(steps, shift, terminal=terminal, spacing=spacing[0], grid=grid, sigmas=sigmas)


Velocity = Callable[[Tensor, float], Tensor]  # v(x, σ), shaped like x


class Step(NamedTuple):
    """One step's result: the new latents, the velocity where it began (x0 = x − σ·v), what the next step looks back on."""

    latents: Tensor
    velocity: Tensor
    history: tuple = ()


def _wide(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _takes(out: Tensor | None, x: Tensor, velocity: Tensor) -> bool:
    """Whether ``out`` can hold every intermediate sum: it is given, and none is wider than x."""
    return out is not None and x.dtype == torch.promote_types(velocity.dtype, torch.float32)


def _advance(x: Tensor, velocity: Tensor, width: float, out: Tensor | None = None) -> Tensor:
    """x + h·v in fp32 at least, cast back to the dtype of x; the same bits into ``out``, which may be the velocity."""
    if _takes(out, x, velocity):
        return out.copy_(velocity).mul_(width).add_(x)
    new = (_wide(x) + width * _wide(velocity)).to(x.dtype)
    return new if out is None else out.copy_(new)


def euler_step(
    velocity: Velocity, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """x ← x + h·v(x, σ) with h = σ_next − σ. One call, error O(1/N).

    Args:
        velocity: v(x, σ).
        x: latents of any rank, any float dtype; the update is fp32 and cast back.
        sigma, sigma_next: where the step begins and ends, 1 ≥ σ > σ_next ≥ 0.
        history: what the step before handed back; () at the start. Euler and Heun ignore it.
        out: where the new latents go, shaped like x and not x itself: the same bits, and fp32 allocates nothing.
    """
    v = velocity(x, sigma)
    return Step(_advance(x, v, sigma_next - sigma, out), v)


def heun_step(
    velocity: Velocity, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """x ← x + h·(v(x, σ) + v(x + h·v, σ_next))/2. Two calls, error O(1/N²). Args: as `euler_step`."""
    v, width = velocity(x, sigma), sigma_next - sigma
    ahead = velocity(_advance(x, v, width, out), sigma_next)
    mean = out.copy_(ahead).add_(v).div_(2) if _takes(out, x, v) else (_wide(v) + _wide(ahead)) / 2
    return Step(_advance(x, mean, width, out), v)


def multistep_step(
    velocity: Velocity, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """x ← x + h·(v + h/2·(v − v_prev)/h_prev): Adams–Bashforth 2 for uneven steps. One call, error O(1/N²).

    Args: as `euler_step`; ``history`` is () or (v_prev, h_prev), and the first step is Euler's.
    """
    v, width = velocity(x, sigma), sigma_next - sigma
    half_way = _wide(v)
    if history:
        v_prev, ratio = history[0], width / (2 * history[1])
        if _takes(out, x, v):
            half_way = out.copy_(v_prev).sub_(v).mul_(-ratio).add_(v)
        else:
            half_way = half_way + ratio * (half_way - _wide(v_prev))
    return Step(_advance(x, half_way, width, out), v, (v, width))


SOLVERS = {"euler": euler_step, "heun": heun_step, "multistep": multistep_step}
SOLVER_CALLS = {"euler": 1, "heun": 2, "multistep": 1}  # calls of the velocity a step
