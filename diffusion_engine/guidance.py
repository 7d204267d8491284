# Generated from notebooks/source/08_guidance.py by `course export`.
# Do not edit: change the chapter and export again.

import math
from collections.abc import Callable

import torch
from torch import Tensor

from diffusion_engine.text_conditioning import PromptEmbeds, stack_prompts


def guide(v_uncond: Tensor, v_cond: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: v = v_u + w·(v_c − v_u), exact at w = 0 and w = 1.

    Args:
        v_uncond: v_u, velocity of the empty or negative prompt, (B, …).
        v_cond: v_c, velocity of the prompt, shaped like ``v_uncond``.
        scale: w, any finite number; 1 is the prompt alone.

    Returns:
        (B, …) in the dtype of ``v_cond``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, or ``scale`` is NaN or infinite.

    Source: Ho & Salimans 2022; w here is their 1 + w, as in diffusers and in the models' own papers since.
    """
    if v_uncond.shape != v_cond.shape:
        raise ValueError(f"v_uncond {tuple(v_uncond.shape)} and v_cond {tuple(v_cond.shape)} differ; pass equal shapes")
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale {scale} is not finite; try 1 (the prompt alone) to 7")
    exact = torch.promote_types(v_cond.dtype, torch.float32)
    return torch.lerp(v_uncond.to(exact), v_cond.to(exact), scale).to(v_cond.dtype)


Model = Callable[[Tensor, Tensor, PromptEmbeds], Tensor]  # (x (B, …), t (B,) in 0…1000, prompt) → velocity (B, …)
Velocity = Callable[[Tensor, float], Tensor]  # (x (B, …), σ) → velocity (B, …)


def repeat_prompt(prompt: PromptEmbeds, batch: int) -> PromptEmbeds:
    """One prompt for every sample of a batch; as many prompts as samples pass unchanged.

    Raises:
        ValueError: neither one prompt nor ``batch`` prompts.
    """
    have = len(prompt.pooled)
    if have not in (1, batch):
        raise ValueError(f"{have} prompts for {batch} samples; give 1 or {batch}")
    return prompt if have == batch else PromptEmbeds(*(t.repeat_interleave(batch, dim=0) for t in prompt))


def both_velocities(
    model: Model, x: Tensor, t: Tensor, uncond: PromptEmbeds, cond: PromptEmbeds, batched: bool = True
) -> tuple[Tensor, Tensor]:
    """(v_u, v_c): one forward of 2·B samples, uncond first; or, not batched, two forwards of B."""
    uncond, cond = repeat_prompt(uncond, len(x)), repeat_prompt(cond, len(x))
    if not batched:
        return model(x, t, uncond), model(x, t, cond)
    return model(torch.cat([x, x]), torch.cat([t, t]), stack_prompts([uncond, cond])).chunk(2)


def require_range(name: str, value: float, low: float = 0.0, high: float = 1.0) -> None:
    """Raise ValueError unless low ≤ value ≤ high."""
    if not low <= value <= high:
        raise ValueError(f"{name} {value} lies outside {low:g}…{high:g}; try {min(max(value, low), high):g}")


def guided_velocity(
    model: Model,
    cond: PromptEmbeds,
    uncond: PromptEmbeds | None,
    scale: float,
    batched: bool = True,
    interval: tuple[float, float] | None = None,
    rescale: float = 0.0,
    zero_star: bool = False,
    zero_above: float | None = None,
) -> Velocity:
    """v(x, σ) of the guided network, for any sampler.

    Args:
        model: the network; it is fed t = 1000·σ in fp32, one a sample.
        cond: the prompts: one, or one a sample.
        uncond: the empty or negative prompts; may be None where scale is 1, which never reads them.
        scale: w of `guide`. 1 costs one forward of B samples a call, every other w costs 2·B.
        batched: one forward of 2·B, uncond first; else two forwards of B. Equal up to rounding.
        interval: guide only where low < σ ≤ high; elsewhere w = 1.
        rescale: see `rescale_velocity`.
        zero_star: scale v_uncond as `project_uncond` does.
        zero_above: the velocity is zero where σ > zero_above; sigmas[k] of a schedule silences its first k steps.

    Raises:
        ValueError: scale not finite, uncond missing, or a number outside 0…1; at the call: a wrong number of prompts.

    Source: Ho & Salimans 2022; interval: Kynkäänniemi et al. 2024; zero_star, zero_above: Fan et al. 2025 (CFG-Zero*).
    """
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale {scale} is not finite; try 1 (the prompt alone) to 7")
    if uncond is None and scale != 1:
        raise ValueError(f"guidance scale {scale} needs uncond, the embedding of the empty prompt; or try scale 1")
    low, high = interval or (-math.inf, math.inf)
    if not low < high:
        raise ValueError(f"interval {interval} is empty; try {(high, low)}")
    require_range("rescale", rescale)
    for edge in interval or ():
        require_range("interval", edge)
    if zero_above is not None:
        require_range("zero_above", zero_above)

    def velocity(x: Tensor, sigma: float) -> Tensor:
        sigma = float(sigma)
        if zero_above is not None and sigma > zero_above:
            return torch.zeros_like(x)
        t = torch.full((len(x),), 1000 * sigma, dtype=torch.float32, device=x.device)
        w = scale if low < sigma <= high else 1.0
        if w == 1 or (w == 0 and not zero_star):
            return model(x, t, repeat_prompt(cond if w == 1 else uncond, len(x)))
        v_uncond, v_cond = both_velocities(model, x, t, uncond, cond, batched)
        v = guide(project_uncond(v_uncond, v_cond) if zero_star else v_uncond, v_cond, w)
        return rescale_velocity(v, v_cond, rescale) if rescale else v

    return velocity


def rescale_velocity(v: Tensor, v_cond: Tensor, amount: float) -> Tensor:
    """v' = φ·std(v_c)/std(v)·v + (1 − φ)·v, standard deviations over each sample.

    Args:
        v: guided velocity, (B, …).
        v_cond: velocity of the prompt alone, shaped like ``v``.
        amount: φ in 0…1; 0 changes nothing, 1 restores the standard deviation of ``v_cond``.

    Raises:
        ValueError: ``amount`` outside 0…1.

    Source: Lin et al. 2023, §3.4 (they use 0.7).
    """
    require_range("rescale", amount)
    sample_dims = tuple(range(1, v.ndim))
    std, target = (y.float().std(sample_dims, keepdim=True) for y in (v, v_cond))
    ratio = torch.where(std > 0, target / std, 1.0)  # (B, 1, …)
    return (v.float() * (1 + amount * (ratio - 1))).to(v.dtype)


def project_uncond(v_uncond: Tensor, v_cond: Tensor) -> Tensor:
    """α·v_u with α = ⟨v_c, v_u⟩ / |v_u|² of each sample: the multiple of v_u nearest to v_c (CFG-Zero*).

    Args:
        v_uncond: v_u, (B, …).
        v_cond: v_c, shaped like ``v_uncond``.

    Source: Fan et al. 2025 (CFG-Zero*), §4.
    """
    u, c = v_uncond.float(), v_cond.float()
    sample_dims = tuple(range(1, u.ndim))
    dot = (c * u).sum(sample_dims, keepdim=True)  # (B, 1, …)
    alpha = dot / u.square().sum(sample_dims, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (alpha * u).to(v_uncond.dtype)
