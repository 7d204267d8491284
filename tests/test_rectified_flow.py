"""Harder truths for chapter 01: any rank, dtype and batch, closed forms, bad input, mistakes that keep all shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_engine.rectified_flow import (
    append_dims,
    integrate,
    interpolate,
    predict_data,
    predict_noise,
    straightness,
    velocity_target,
)

SHAPES = [(3, 2), (3, 3), (2, 4, 8, 6), (2, 4, 5, 8, 6), (1, 1), (4,)]
MU, TAU = torch.tensor([2.0, -1.0], dtype=torch.float64), 0.4


def pair(shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for _ in range(2))


def cloud(x, s):
    """The velocity field of one Gaussian cloud N(MU, TAU²)."""
    variance = (1 - s) ** 2 * TAU**2 + s**2
    return -MU + (s - (1 - s) * TAU**2) / variance * (x - (1 - s) * MU)


@given(st.sampled_from(SHAPES), st.integers(0, 2**32), st.data())
@settings(max_examples=40, deadline=None)
def test_both_ends_come_back(shape, seed, draw):
    data, noise = pair(shape, torch.float64, seed)
    numbers = st.lists(st.floats(0, 1, width=32), min_size=shape[0], max_size=shape[0])
    sigma = torch.tensor(draw.draw(numbers), dtype=torch.float32)
    x, v = interpolate(data, noise, sigma), velocity_target(data, noise)
    torch.testing.assert_close(predict_data(x, v, sigma), data, atol=1e-9, rtol=0)
    torch.testing.assert_close(predict_noise(x, v, sigma), noise, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_equals_single(shape):
    data, noise = pair(shape)
    sigma = torch.linspace(0, 1, shape[0])
    together = interpolate(data, noise, sigma)
    for i in range(shape[0]):
        assert torch.equal(together[i : i + 1], interpolate(data[i : i + 1], noise[i : i + 1], sigma[i].item()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_is_kept_and_rounded_once(dtype):
    data, noise = pair((2, 4, 8, 8), dtype)
    wide = torch.promote_types(dtype, torch.float32)
    sigma = torch.tensor([0.3, 0.7])
    s = sigma.to(wide).reshape(2, 1, 1, 1)
    x = interpolate(data, noise, sigma)
    assert x.dtype == dtype and torch.equal(x, ((1 - s) * data.to(wide) + s * noise.to(wide)).to(dtype))
    assert predict_data(x, noise, sigma).dtype == dtype == predict_noise(x, noise, 0.3).dtype


def test_ends_are_exact_and_inputs_untouched():
    data, noise = pair((3, 4))
    kept = data.clone(), noise.clone()
    assert torch.equal(interpolate(data, noise, 0.0), data) and torch.equal(interpolate(data, noise, 1.0), noise)
    integrate(lambda x, s: x, noise, [1.0, 0.0], "heun")
    assert torch.equal(data, kept[0]) and torch.equal(noise, kept[1])


@pytest.mark.parametrize("sigma", [-0.1, 1.1, 750.0, 2000.0, math.nan, math.inf, torch.tensor([0.5, 900.0])])
def test_sigma_outside_is_refused(sigma):
    data, noise = pair((2, 3))
    for call in (interpolate, predict_data, predict_noise):
        with pytest.raises(ValueError, match="outside 0…1; try"):
            call(data, noise, sigma)


def test_sigma_error_names_the_value_that_was_meant():
    with pytest.raises(ValueError, match=r"sigma 750 .* try 0\.75"):
        append_dims(750.0, torch.zeros(1, 2))


@pytest.mark.parametrize("sigma", [torch.ones(3), torch.ones(2, 1), torch.ones(1)])
def test_sigma_of_another_length_is_refused(sigma):
    with pytest.raises(ValueError, match="one a sample"):
        append_dims(sigma, torch.zeros(2, 3))


def test_shapes_that_only_broadcast_are_refused():
    a, b = torch.zeros(2, 3), torch.zeros(1, 3)
    for call in (velocity_target, lambda a, b: interpolate(a, b, 0.5), lambda a, b: predict_data(a, b, 0.5)):
        with pytest.raises(ValueError, match="differ"):
            call(a, b)


@pytest.mark.parametrize("sigmas", [[], [1.0], [0.0, 1.0], [1.0, 1.0, 0.0], [1.5, 0.0], [1.0, -0.1], [1.0, math.nan]])
def test_walks_that_do_not_fall_are_refused(sigmas):
    with pytest.raises(ValueError, match="fall within 1…0"):
        integrate(lambda x, s: x, torch.zeros(1, 2), sigmas)


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match='try "euler" or "heun"'):
        integrate(lambda x, s: x, torch.zeros(1, 2), [1.0, 0.0], "rk45")


@given(st.lists(st.floats(0.001, 0.999), min_size=0, max_size=6, unique=True), st.sampled_from(["euler", "heun"]))
@settings(max_examples=30, deadline=None)
def test_straight_roads_are_exact_however_stepped(between, method):
    data, noise = pair((5, 3), torch.float64)
    sigmas = [1.0, *sorted(between, reverse=True), 0.0]
    end = integrate(lambda x, s: noise - data, noise, sigmas, method)
    torch.testing.assert_close(end, data, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("method", "slope"), [("euler", -1), ("heun", -2)])
def test_error_slopes(method, slope):
    noise = pair((200, 2), torch.float64)[0]
    errors = []
    for n in (100, 200):
        end = integrate(cloud, noise, torch.linspace(1, 0, n + 1, dtype=torch.float64), method)
        errors.append((end - MU - TAU * noise).abs().mean().item())
    assert abs(math.log2(errors[1] / errors[0]) - slope) < 0.05


def test_calls_and_path():
    calls = []
    noise = pair((2, 3))[0]
    sigmas = [1.0, 0.5, 0.25, 0.0]
    path = integrate(lambda x, s: (calls.append(s), torch.zeros_like(x))[1], noise, sigmas, return_path=True)
    assert calls == [1.0, 0.5, 0.25] and path.shape == (4, 2, 3) and torch.equal(path[0], noise)
    calls.clear()
    integrate(lambda x, s: (calls.append(s), torch.zeros_like(x))[1], noise, sigmas, "heun")
    assert calls == [1.0, 0.5, 0.5, 0.25, 0.25, 0.0]


def test_straightness_knows_shape_and_pace():
    steps = torch.linspace(0, 1, 21, dtype=torch.float64)[:, None]
    line, start = torch.tensor([[3.0, 4.0]], dtype=torch.float64), pair((1, 2), torch.float64)[0]
    even = start + steps[..., None] * line
    assert straightness(even).max() < 1e-20
    assert straightness(start + steps[..., None].square() * line).min() > 1  # straight, but faster and faster
    assert torch.allclose(straightness(2 * even.square()), 4 * straightness(even.square()))  # a squared length
    video = pair((5, 2, 4, 3, 8, 8))[0]
    assert torch.allclose(straightness(video), straightness(video.flatten(2)))
    for wrong in (torch.zeros(1, 3), torch.zeros(4)):
        with pytest.raises(ValueError, match="expected"):
            straightness(wrong)


@pytest.mark.parametrize("method", ["euler", "heun"])
def test_a_velocity_that_only_broadcasts_is_refused(method):
    with pytest.raises(ValueError, match="differ"):
        integrate(lambda x, s: x[:1], torch.zeros(3, 2), [1.0, 0.0], method)


def test_bytes_are_not_interpolated():
    picture = torch.full((1, 3, 2, 2), 200, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scale it to −1…1"):
        interpolate(picture, picture, 0.5)
