# Generated from notebooks/source/23_solvers.py by `course export`.
# Do not edit: change the chapter and export again.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_engine.rectified_flow import predict_data
from diffusion_engine.reference.checkpoint import read_json, require
from diffusion_engine.scheduler import TRAIN_STEPS, Schedule, Step, euler_step, make_schedule, shift_sigmas


class Look(NamedTuple):
    """One question to the network: the noise level, and the data x̂0 = x − σ·v that it guessed there, fp32 at least."""

    sigma: float
    data: Tensor


def look(velocity: Callable, x: Tensor, sigma: float) -> tuple[Tensor, Look]:
    """The velocity at x, and its `Look`."""
    v = velocity(x, sigma)
    return v, Look(sigma, predict_data(x.to(torch.promote_types(x.dtype, torch.float32)), v, sigma))


def blend(x: Tensor, data: Tensor, ratio: float) -> Tensor:
    """ratio · x + (1 − ratio) · D with ratio = σ' / σ, in the dtype of D."""
    return torch.lerp(data, x.to(data.dtype), ratio)


def log_odds(sigma: float) -> float:
    """λ = ln((1 − σ) / σ): −∞ at noise, +∞ at data."""
    return math.copysign(math.inf, 0.5 - sigma) if sigma in (0, 1) else math.log((1 - sigma) / sigma)


def ahead(looks: Sequence[Look], sigma_next: float) -> Tensor:
    """D for the step to σ_next: x̂0 half way in λ, on the line through the two newest looks, newest first.

    Where there is one look only, or the way is infinite: the newest itself.
    """
    now, *before = looks
    if not before or sigma_next == 0:
        return now.data
    way, last = (log_odds(b) - log_odds(a) for a, b in ((now.sigma, sigma_next), (before[0].sigma, now.sigma)))
    return now.data + way / (2 * last) * (now.data - before[0].data)


def dpm_step(
    velocity: Callable, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """DPM-Solver++ (2M, midpoint) on the straight road; one call. Arguments: as `euler_step`; ``history`` is the last look.

    Source: Lu et al. 2022 (DPM-Solver++), algorithm 2; diffusers' ``DPMSolverMultistepScheduler``.
    """
    v, now = look(velocity, x, sigma)
    new = blend(x, ahead((now, *history), sigma_next), sigma_next / sigma).to(x.dtype)
    return Step(new if out is None else out.copy_(new), v, (now,))


def dpm_schedule(num_inference_steps: int, shift: float = 1.0) -> Schedule:
    """The first N of N + 1 even points 0.999 … 0, shifted; whole-numbered times. Source: diffusers, "flow sigmas" of DPM.

    Raises:
        ValueError: N or the shift outside its range.
    """
    steps, smallest = make_schedule(num_inference_steps).num_steps, 1 / TRAIN_STEPS  # refuses other counts
    shares = 1 - torch.arange(1, steps + 1, dtype=torch.float64) * ((1 - smallest) / steps)
    shares[-1] = smallest  # as numpy's linspace ends
    return Schedule((*shift_sigmas(1 - shares.flip(0), shift).tolist(), 0.0), integer_timesteps=True)


def moments(h: float) -> tuple[float, float]:
    """E[u] and E[u²] of u in 0 … 1 with weights e^(h·u): where on a step of width h in λ the mean of x̂0 lies."""
    whole = -1 / math.expm1(-h)
    first = whole - 1 / h
    return first, whole - 2 * first / h


def behind(looks: Sequence[Look]) -> Tensor:
    """D of the step just walked, from the looks at its end, at its beginning and, where there is one, before.

    The mean of the parabola through the three, see `moments`; of two alone half way between them.
    """
    new, old, *older = looks
    if not older:
        return (old.data + new.data) / 2
    h, h_last = (log_odds(b.sigma) - log_odds(a.sigma) for a, b in ((old, new), (older[0], old)))
    r, (first, second) = h_last / h, moments(h)
    share = (first - second) / (1 + r)
    return old.data + (first - share) * (new.data - old.data) + share / r * (old.data - older[0].data)


def unipc_step(
    velocity: Callable, x: Tensor, sigma: float, sigma_next: float, history: tuple = (), out: Tensor | None = None
) -> Step:
    """UniPC (order 2, B₂): mend the last step with the look at its end, then step as `dpm_step` does; one call.

    Arguments: as `euler_step`; ``history`` is where the last step began, and the looks there and before.

    Source: Zhao et al. 2023 (UniPC); diffusers' ``UniPCMultistepScheduler``.
    """
    v, now = look(velocity, x, sigma)
    start, *known = history or (x,)
    looks = (now, *known)
    better = blend(start, behind(looks), sigma / known[0].sigma) if known else x
    new = blend(better, ahead(looks[:2], sigma_next), sigma_next / sigma).to(x.dtype)
    return Step(new if out is None else out.copy_(new), v, (better, *looks[:2]))


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}  # must be said; the rest only not contradicted
FIXED = {  # class → its step, and the settings of which one value is built
    "FlowMatchEulerDiscreteScheduler": (euler_step, {}),
    "UniPCMultistepScheduler": (
        unipc_step,
        {"solver_order": 2, "solver_type": "bh2", "predict_x0": True, "lower_order_final": True}
        | {"disable_corrector": [], "solver_p": None},
    ),
    "DPMSolverMultistepScheduler": (
        dpm_step,
        {"solver_order": 2, "solver_type": "midpoint", "algorithm_type": "dpmsolver++", "final_sigmas_type": "zero"}
        | {"num_train_timesteps": TRAIN_STEPS, "thresholding": False, "use_dynamic_shifting": False}
        | {f"use_{name}": False for name in ("karras_sigmas", "exponential_sigmas", "beta_sigmas", "lu_lambdas")}
        | FLOW,
    ),
}
IDLE = frozenset(  # of DPM: its old noise table, and what moves nothing where flow levels end at zero
    "flow_shift beta_start beta_end beta_schedule trained_betas dynamic_thresholding_ratio sample_max_value steps_offset "
    "lower_order_final euler_at_final lambda_min_clipped variance_type timestep_spacing rescale_betas_zero_snr "
    "time_shift_type".split()
)


class Road(NamedTuple):
    """Where a family stops and how it walks: a schedule and a solver step, both for `generate`."""

    schedule: Schedule
    solver: Callable


def read_road(folder: Path, steps: int, num_tokens: int | None = None, grid: str = "even") -> Road:
    """The road of a folder with ``scheduler_config.json``: flow-match Euler, UniPC or DPM-Solver++.

    Args:
        steps: N. num_tokens, grid: see `Schedule.from_config`; unused by UniPC and DPM.

    Raises:
        ValueError: another class, or a setting that is not built; names it and what is.
    """
    config = read_json(folder / "scheduler_config.json")
    name = config.get("_class_name")
    if name not in FIXED:
        raise ValueError(f"scheduler class {name!r} is not supported; try {' or '.join(FIXED)}")
    solver, fixed = FIXED[name]
    for key, value in fixed.items():
        if (said := config.get(key, None if key in FLOW else value)) != value:
            raise ValueError(f"{name} with {key} = {said!r} is not supported; only {value!r} is")
    if name != "DPMSolverMultistepScheduler":
        return Road(Schedule.from_config(config, steps, num_tokens, grid), solver)
    if unknown := [key for key in config if key[0] != "_" and key not in fixed and key not in IDLE]:
        raise ValueError(f"{name} setting {unknown[0]} is unknown; known are {', '.join([*fixed, *sorted(IDLE)])}")
    return Road(dpm_schedule(steps, config.get("flow_shift", 1.0)), solver)


def told_times(network: Callable, schedule: Schedule) -> Callable:
    """network(x, t, …) asked with t = 1000 · σ (B,), and told the schedule's own time of the nearest level instead."""
    stations, times = TRAIN_STEPS * schedule.sigmas[:-1], schedule.timesteps

    def asked(x: Tensor, t: Tensor, *condition, **more) -> Tensor:
        nearest = (stations.to(t) - t.unsqueeze(1)).abs().argmin(dim=1)
        return network(x, times.to(t)[nearest], *condition, **more)

    return asked


@dataclass(frozen=True)
class DDIM:
    """``scheduler_config.json`` of diffusers' ``CogVideoXDDIMScheduler``: its names, its defaults.

    Built for v-prediction and trailing time steps; the entries about clipping are idle there, too.

    Raises:
        ValueError: another prediction, spacing, β or number of training steps.
    """

    num_train_timesteps: int = TRAIN_STEPS
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    clip_sample: bool = True
    set_alpha_to_one: bool = True
    prediction_type: str = "epsilon"
    clip_sample_range: float = 1.0
    sample_max_value: float = 1.0
    timestep_spacing: str = "leading"
    rescale_betas_zero_snr: bool = False
    snr_shift_scale: float = 3.0

    def __post_init__(self):
        require(self, num_train_timesteps=TRAIN_STEPS, beta_schedule="scaled_linear")
        require(self, prediction_type="v_prediction", timestep_spacing="trailing")

    @property
    def alphas_cumprod(self) -> Tensor:
        """ᾱ of t = 0 … 999, float64: Π (1 − β); 1 − ᾱ shifted as σ is; √ᾱ stretched to end at 0 (zero terminal SNR)."""
        betas = torch.linspace(self.beta_start**0.5, self.beta_end**0.5, TRAIN_STEPS, dtype=torch.float64) ** 2
        alphas = 1 - shift_sigmas(1 - (1 - betas).cumprod(0), self.snr_shift_scale)
        first, last = alphas[0].sqrt(), alphas[-1].sqrt()
        return ((alphas.sqrt() - last) * first / (first - last)) ** 2 if self.rescale_betas_zero_snr else alphas

    @property
    def angles(self) -> Tensor:
        """φ of t = 0 … 999, float64: cos φ = √ᾱ."""
        return self.alphas_cumprod.sqrt().acos()

    @cached_property  # asked at every step
    def sigmas(self) -> Tensor:
        """s = sin φ / (cos φ + sin φ) of t = 0 … 999, float64: where on the straight road the step t lies."""
        angles = self.angles
        return angles.sin() / (angles.cos() + angles.sin())


def ddim_timesteps(num_inference_steps: int) -> list[int]:
    """N steps of training from 999 down, 1000 / N apart ("trailing").

    diffusers' rounding, ties included; where its grid gains a step t = −1 by rounding (N = 61, …), it is left out.

    Raises:
        ValueError: N is no whole number within 1…1000.
    """
    steps = make_schedule(num_inference_steps).num_steps  # refuses other counts
    gap = TRAIN_STEPS - (TRAIN_STEPS - TRAIN_STEPS / steps)  # as numpy's arange rounds it: decides ties
    return [round(TRAIN_STEPS - k * gap) - 1 for k in range(steps)]


def straight_schedule(ddim: DDIM, num_inference_steps: int) -> Schedule:
    """The steps of `ddim_timesteps` on the straight road, for `straighten`.

    Where N divides 1000 each ends where diffusers ends it; elsewhere diffusers' steps end a little off the next one's beginning
    and off data, and these do not.

    Raises:
        ValueError: noise that does not run from pure noise to data.
    """
    require(ddim, rescale_betas_zero_snr=True, set_alpha_to_one=True)
    return Schedule((*ddim.sigmas[ddim_timesteps(num_inference_steps)].tolist(), 0.0))


def nearest_steps(ddim: DDIM, s: Tensor) -> Tensor:
    """The step of training that lies nearest to each s (B,) on the straight road: what the network is told, 0.0 … 999.0."""
    return (ddim.sigmas.float().to(s.device) - s.unsqueeze(1)).abs().argmin(dim=1).float()


def straighten(network: Callable[..., Tensor], ddim: DDIM) -> Callable[..., Tensor]:
    """A v-predicting network as a velocity on the straight road: u = k² (2s − 1) · y + k · v(k · y, t_train).

    k = 1 / √(s² + (1 − s)²) = cos φ + sin φ. Walk it down `straight_schedule`; guidance may come before or after.

    Args:
        network: network(x, t, …) → v, t = 0 … 999. ddim: says which is taken at which s, see `nearest_steps`.

    Returns:
        velocity(latents y (B, …), t = 1000 · s (B,), …) → (B, …) in the dtype of y; what follows t is handed on.

    Source: Gao et al. 2024, "Diffusion meets flow matching".
    """

    def velocity(latents: Tensor, t: Tensor, *condition, **more) -> Tensor:
        s = t.float() / TRAIN_STEPS
        step = nearest_steps(ddim, s)
        s = s.reshape(-1, *[1] * (latents.ndim - 1))
        k, y = (s**2 + (1 - s) ** 2) ** -0.5, latents.float()
        v = network((k * y).to(latents.dtype), step, *condition, **more)
        return (k**2 * (2 * s - 1) * y + k * v.float()).to(latents.dtype)

    return velocity
