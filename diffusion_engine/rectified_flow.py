# Generated from notebooks/source/01_rectified_flow.py by `course export`.
# Do not edit: change the chapter and export again.

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def append_dims(sigma: float | Tensor, like: Tensor) -> Tensor:
    """One σ a sample, shaped to multiply ``like``: (B,) → (B, 1, …, 1), whatever the rank of ``like``.

    Args:
        sigma: one number for the whole batch, or a tensor (B,); in 0…1.
        like: points (B, D), images (B, C, H, W) or videos (B, C, T, H, W).

    Returns:
        (B, 1, …, 1), or a scalar tensor for one number; at least fp32, on the device of ``like``.

    Raises:
        ValueError: σ lies outside 0…1 or is NaN, or its length is not the batch size.

    Source: lucidrains, rectified-flow-pytorch (``append_dims``).
    """
    sigma = torch.as_tensor(sigma, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    outside = sigma[~((sigma >= 0) & (sigma <= 1))]
    if outside.numel():
        worst = outside[0].item()
        near = worst / 1000 if 1 < worst <= 1000 else float(worst > 0)
        raise ValueError(f"sigma {worst:g} lies outside 0…1; try {near:g} (t = 1000·sigma is for the network alone)")
    if sigma.ndim == 0:
        return sigma
    if sigma.shape != like.shape[:1]:
        raise ValueError(f"sigma has shape {tuple(sigma.shape)}; expected one a sample, {tuple(like.shape[:1])}")
    return sigma.reshape(-1, *[1] * (like.ndim - 1))


def _same_shape(**tensors: Tensor) -> None:
    """Refuse two tensors that would only broadcast."""
    (first, a), (second, b) = tensors.items()
    if a.shape != b.shape:
        raise ValueError(
            f"{first} {tuple(a.shape)} and {second} {tuple(b.shape)} differ; both must be {tuple(a.shape)}"
        )


def interpolate(data: Tensor, noise: Tensor, sigma: float | Tensor) -> Tensor:
    """The point at σ on the straight road from data to noise: x_σ = (1 − σ)·x0 + σ·ε.

    Args:
        data: x0, (B, …).
        noise: ε, shaped like ``data``.
        sigma: one number or (B,), in 0…1; 0 is data, 1 is noise.

    Returns:
        x_σ, shape and dtype of ``data``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, whole-number data, or σ refused by `append_dims`.

    Source: Liu et al. 2022 (Rectified Flow), §2.1; σ here runs from data to noise.
    """
    _same_shape(data=data, noise=noise)
    if not data.is_floating_point():
        raise ValueError(f"data of {data.dtype} would be rounded to whole numbers; scale it to −1…1 in float32")
    s = append_dims(sigma, data)
    return ((1 - s) * data + s * noise).to(data.dtype)


def velocity_target(data: Tensor, noise: Tensor) -> Tensor:
    """What the network learns: v = dx_σ/dσ = ε − x0, constant along the road.

    Args:
        data: x0, (B, …).
        noise: ε, shaped like ``data``.

    Raises:
        ValueError: shapes differ.

    Source: Liu et al. 2022, eq. 1; Lipman et al. 2022 (Flow Matching), optimal-transport path; signs as in SD3.
    """
    _same_shape(data=data, noise=noise)
    return noise - data


def predict_data(x: Tensor, velocity: Tensor, sigma: float | Tensor) -> Tensor:
    """The data end of the road through x_σ: x0 = x_σ − σ·v.

    Args:
        x: x_σ, (B, …).
        velocity: v, shaped like ``x``.
        sigma: one number or (B,), in 0…1.

    Returns:
        x0, shape and dtype of ``x``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, or σ is refused by `append_dims`.
    """
    _same_shape(x=x, velocity=velocity)
    return (x - append_dims(sigma, x) * velocity).to(x.dtype)


def predict_noise(x: Tensor, velocity: Tensor, sigma: float | Tensor) -> Tensor:
    """The noise end of the road through x_σ: ε = x_σ + (1 − σ)·v.

    Args:
        x: x_σ, (B, …).
        velocity: v, shaped like ``x``.
        sigma: one number or (B,), in 0…1.

    Returns:
        ε, shape and dtype of ``x``; computed in fp32 at least.

    Raises:
        ValueError: shapes differ, or σ is refused by `append_dims`.
    """
    _same_shape(x=x, velocity=velocity)
    return (x + (1 - append_dims(sigma, x)) * velocity).to(x.dtype)


def integrate(
    velocity: Callable[[Tensor, float], Tensor],
    noise: Tensor,
    sigmas: Iterable[float] | Tensor,
    method: str = "euler",
    return_path: bool = False,
) -> Tensor:
    """Walk dx/dσ = v(x, σ) from the first σ to the last.

    Euler: x ← x + (σ_next − σ)·v(x, σ). Heun: the same with the mean of the velocities at both ends.

    Args:
        velocity: v(x, σ) → shaped like x; σ is a float.
        noise: where the walk begins, (B, …).
        sigmas: N + 1 falling numbers in 0…1.
        method: ``"euler"`` (one call a step, error O(1/N)) or ``"heun"`` (two calls, error O(1/N²)).
        return_path: give every state instead of the last.

    Returns:
        The last state, shaped like ``noise``; or the path (N + 1, B, …), which begins with ``noise``.

    Raises:
        ValueError: unknown method; fewer than two σ; σ that do not fall or leave 0…1; a velocity not shaped like x.

    Source: Liu et al. 2022, §2.1 (Euler); Karras et al. 2022, algorithm 1 (Heun).
    """
    if method not in ("euler", "heun"):
        raise ValueError(f'method "{method}" is unknown; try "euler" or "heun"')
    levels = [float(s) for s in sigmas]
    if len(levels) < 2 or not all(1 >= a > b >= 0 for a, b in zip(levels, levels[1:])):
        raise ValueError(f"sigmas {levels} must be two or more numbers that fall within 1…0; try [1.0, 0.5, 0.0]")
    x, path = noise, [noise]
    for s, s_next in zip(levels, levels[1:]):
        v = velocity(x, s)
        if method == "heun":
            v = (v + velocity(x + (s_next - s) * v, s_next)) / 2
        _same_shape(x=x, velocity=v)
        x = x + (s_next - s) * v
        path.append(x)
    return torch.stack(path) if return_path else x


def straightness(path: Tensor) -> Tensor:
    """How far a walk is from one straight, even stride: S = mean_i ‖(x_N − x_0) − N·(x_{i+1} − x_i)‖².

    Args:
        path: states at evenly spaced σ, (N + 1, B, …), as `integrate` returns them.

    Returns:
        (B,), squared length; 0 for a straight path walked evenly (there one Euler step is exact), larger as it bends.

    Raises:
        ValueError: fewer than two states, or no batch dimension.

    Source: Liu et al. 2022, §2.2, S(Z).
    """
    if path.ndim < 2 or len(path) < 2:
        raise ValueError(f"path has shape {tuple(path.shape)}; expected (N + 1, B, …) with N of at least 1")
    path = path.reshape(*path.shape[:2], -1)  # (N + 1, B, D)
    strides = (len(path) - 1) * path.diff(dim=0)  # (N, B, D)
    return (path[-1] - path[0] - strides).square().sum(-1).mean(0)  # (B,)
