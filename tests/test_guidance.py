"""Harder checks of chapter 08: guided velocities, exact where they must be, and their variants."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_engine.guidance import (
    both_velocities,
    guide,
    guided_velocity,
    project_uncond,
    repeat_prompt,
    require_range,
    rescale_velocity,
)
from diffusion_engine.text_conditioning import PromptEmbeds

ROOT = Path(__file__).resolve().parents[1]
IMAGES, VIDEOS = (3, 4, 6, 10), (3, 4, 5, 6, 10)
SHAPES = [(3, 2), IMAGES, VIDEOS]


def pair(shape, seed=0, dtype=torch.float32):
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype).unbind()


def prompt(value: float, batch: int = 1, tokens: int = 2) -> PromptEmbeds:
    return PromptEmbeds(
        torch.full((batch, tokens, 4), value),
        torch.ones(batch, tokens, dtype=torch.bool),
        value + torch.arange(batch * 4.0).reshape(batch, 4),
    )


class Recorder:
    """A network that mixes everything that it is given, and remembers what it was asked."""

    def __init__(self):
        self.batches, self.times, self.pooled = [], [], []

    def __call__(self, x, t, p):
        assert len(x) == len(t) == len(p.tokens) == len(p.mask) == len(p.pooled)
        assert t.dtype == torch.float32 and not p.tokens[~p.mask].any()
        self.batches.append(len(x))
        self.times.append(t)
        self.pooled.append(p.pooled)
        words = (p.tokens * p.mask[..., None]).sum((1, 2)) / p.mask.sum(1)
        level = words + p.pooled.sum(1) + t / 1000  # (B,)
        return (x * 0.3 + level.reshape(-1, *[1] * (x.ndim - 1)).to(x.dtype)).sin()


# --- guide ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.floats(1e-3, 1e3))
def test_both_ends_are_exact(shape, dtype, seed, size):
    u, c = (v * size for v in pair(shape, seed, dtype))
    assert torch.equal(guide(u, c, 0.0), u) and torch.equal(guide(u, c, 1.0), c)


@settings(max_examples=50, deadline=None)
@given(w=st.floats(-20, 20), seed=st.integers(0, 1000))
def test_it_is_the_formula_and_affine(w, seed):
    u, c = pair(IMAGES, seed, torch.float64)
    assert torch.allclose(guide(u, c, w), u + w * (c - u), atol=1e-10)
    assert torch.allclose(guide(u, u, w), u, atol=1e-10)  # nothing to enlarge
    assert torch.allclose(guide(c, u, 1 - w), guide(u, c, w), atol=1e-10)  # mirrored
    assert torch.allclose(guide(u + 5, c + 5, w), guide(u, c, w) + 5, atol=1e-9)


def test_half_precision_is_summed_in_fp32():
    u, c = pair(IMAGES, 0, torch.bfloat16)
    exact = u.double() + 7.5 * (c.double() - u.double())
    assert torch.equal(guide(u, c, 7.5), exact.to(torch.bfloat16))
    naive = u + 7.5 * (c - u)
    assert not torch.equal(naive, exact.to(torch.bfloat16))
    assert guide(u, c, 7.5).dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_is_refused(scale):
    u, c = pair(IMAGES)
    with pytest.raises(ValueError, match="not finite"):
        guide(u, c, scale)
    with pytest.raises(ValueError, match="not finite"):
        guided_velocity(Recorder(), prompt(1.0), prompt(0.0), scale)


def test_shapes_that_would_only_broadcast_are_refused():
    u, c = pair(IMAGES)
    with pytest.raises(ValueError, match="differ"):
        guide(u[:1], c, 2.0)


# --- guided_velocity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5, 1.0, 2.0, 7.5])
@pytest.mark.parametrize("options", [{}, {"rescale": 0.7}, {"zero_star": True}, {"interval": (0.2, 0.8)}])
def test_batched_equals_sequential(shape, scale, options):
    x, _ = pair(shape)
    args = prompt(1.0, tokens=5), prompt(-0.5, tokens=1), scale
    for sigma in (1.0, 0.8, 0.5, 0.2, 0.0):
        a, b = (guided_velocity(Recorder(), *args, batched=flag, **options)(x, sigma) for flag in (True, False))
        assert torch.allclose(a, b, atol=1e-5)


def test_each_sample_keeps_its_own_prompts():
    x, _ = pair(IMAGES)
    conds, unconds = prompt(1.0, batch=3), prompt(-2.0, batch=3)
    together = guided_velocity(Recorder(), conds, unconds, 3.0)(x, 0.5)
    for i in range(3):
        one_cond, one_uncond = (PromptEmbeds(*(t[i : i + 1] for t in p)) for p in (conds, unconds))
        alone = guided_velocity(Recorder(), one_cond, one_uncond, 3.0)(x[i : i + 1], 0.5)
        assert torch.allclose(together[i : i + 1], alone, atol=1e-6)


def test_uncond_comes_first_and_time_is_thousandfold():
    model, (x, _) = Recorder(), pair(IMAGES)
    guided_velocity(model, prompt(1.0), prompt(-9.0), 2.0)(x, 0.123)
    assert torch.equal(model.pooled[0], torch.cat([prompt(-9.0).pooled.repeat(3, 1), prompt(1.0).pooled.repeat(3, 1)]))
    assert torch.equal(model.times[0], torch.full((6,), 123.0))


@pytest.mark.parametrize(
    "scale, options, expected",
    [
        (4.0, {}, [6]),
        (4.0, {"batched": False}, [3, 3]),
        (1.0, {}, [3]),
        (1.0, {"batched": False}, [3]),
        (1.0, {"rescale": 0.7}, [3]),
        (1.0, {"zero_star": True}, [3]),
        (0.0, {}, [3]),
        (0.0, {"zero_star": True}, [6]),  # α·v_u needs both
        (4.0, {"interval": (0.6, 0.9)}, [3]),
        (4.0, {"zero_above": 0.4}, []),
    ],
)
def test_forwards_are_counted(scale, options, expected):
    model, (x, _) = Recorder(), pair(IMAGES)
    guided_velocity(model, prompt(1.0), prompt(0.0), scale, **options)(x, 0.5)
    assert model.batches == expected


def test_scale_one_and_zero_are_the_bare_network():
    model, (x, _) = Recorder(), pair(IMAGES)
    t = torch.full((3,), 500.0)
    for scale, p in ((1.0, prompt(1.0)), (0.0, prompt(-3.0))):
        bare = model(x, t, repeat_prompt(p, 3))
        assert torch.equal(guided_velocity(model, prompt(1.0), prompt(-3.0), scale)(x, 0.5), bare)
    assert torch.equal(
        guided_velocity(model, prompt(1.0), None, 1.0)(x, 0.5), model(x, t, repeat_prompt(prompt(1.0), 3))
    )


def test_the_interval_is_open_below_and_closed_above():
    x, _ = pair(IMAGES)
    guided, bare = (guided_velocity(Recorder(), prompt(1.0), prompt(-3.0), w) for w in (4.0, 1.0))
    within = guided_velocity(Recorder(), prompt(1.0), prompt(-3.0), 4.0, interval=(0.25, 0.75))
    for sigma, inside in ((1.0, False), (0.7501, False), (0.75, True), (0.5, True), (0.2501, True), (0.25, False)):
        assert torch.equal(within(x, sigma), (guided if inside else bare)(x, sigma))
    everywhere = guided_velocity(Recorder(), prompt(1.0), prompt(-3.0), 4.0)
    assert not torch.equal(everywhere(x, 0.0), bare(x, 0.0))  # without an interval σ = 0 is guided too


def test_zero_above_spares_the_level_itself():
    x, _ = pair(IMAGES)
    sigmas = torch.linspace(1, 0, 29)
    velocity = guided_velocity(Recorder(), prompt(1.0), prompt(-3.0), 4.0, zero_above=float(sigmas[1]))
    assert not velocity(x, float(sigmas[0])).any()
    assert velocity(x, float(sigmas[1])).any() and velocity(x, sigmas[1]).any()  # a float or a 0-d tensor


def test_the_same_velocity_serves_batches_of_any_size():
    velocity = guided_velocity(Recorder(), prompt(1.0), prompt(-3.0), 4.0)
    x, _ = pair(IMAGES)
    whole = velocity(x, 0.5)
    parts = torch.cat([velocity(x[:1], 0.5), velocity(x[1:], 0.5)])
    assert torch.allclose(whole, parts, atol=1e-6)


def test_wrong_numbers_of_prompts_are_refused():
    x, _ = pair(IMAGES)
    for cond, uncond in ((prompt(1.0, 2), prompt(0.0)), (prompt(1.0), prompt(0.0, 4))):
        with pytest.raises(ValueError, match="prompts for 3 samples"):
            guided_velocity(Recorder(), cond, uncond, 2.0)(x, 0.5)
    with pytest.raises(ValueError, match="needs uncond"):
        guided_velocity(Recorder(), prompt(1.0), None, 2.0)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"interval": (0.8, 0.2)}, "empty"),
        ({"interval": (0.5, 0.5)}, "empty"),
        ({"interval": (math.nan, 0.5)}, "empty"),
        ({"interval": (-0.1, 0.5)}, "interval -0.1 .* try 0"),
        ({"interval": (0.2, 700.0)}, "interval 700.0 .* try 1"),
        ({"rescale": 1.5}, "rescale 1.5 .* try 1"),
        ({"rescale": math.nan}, "rescale nan"),
        ({"zero_above": -1.0}, "zero_above -1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        guided_velocity(Recorder(), prompt(1.0), prompt(0.0), 2.0, **options)


def test_require_range_takes_the_edges():
    for value in (0.0, 1.0):
        require_range("x", value)


def test_both_velocities_in_their_order():
    x, _ = pair(IMAGES)
    t = torch.full((3,), 100.0)
    for flag in (True, False):
        u, c = both_velocities(Recorder(), x, t, prompt(-3.0), prompt(1.0, tokens=4), flag)
        assert torch.allclose(u, Recorder()(x, t, repeat_prompt(prompt(-3.0), 3)), atol=1e-6)
        assert torch.allclose(c, Recorder()(x, t, repeat_prompt(prompt(1.0, tokens=4), 3)), atol=1e-6)


# --- variants ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=20, deadline=None)
@given(amount=st.floats(0, 1), seed=st.integers(0, 1000))
def test_rescale_keeps_directions_and_reaches_the_volume(shape, amount, seed):
    u, c = pair(shape, seed)
    v = guide(u, c, 6.0)
    out = rescale_velocity(v, c, amount)
    stds = [y.flatten(1).std(1) for y in (v, out, c)]
    assert torch.allclose(stds[1], (1 - amount) * stds[0] + amount * stds[2], rtol=1e-3, atol=1e-6)
    assert torch.allclose(torch.cosine_similarity(out.flatten(1), v.flatten(1)), torch.ones(3), atol=1e-5)


def test_rescale_of_a_constant_velocity_stays_finite():
    flat = torch.full(IMAGES, 2.0)
    assert torch.equal(rescale_velocity(flat, pair(IMAGES)[0], 1.0), flat)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_projection_is_least_squares(shape):
    u, c = pair(shape)
    nearest = project_uncond(u, c)
    distance = (c - nearest).flatten(1).norm(dim=1)
    for factor in (0.9, 1.1):
        assert (distance <= (c - factor * nearest).flatten(1).norm(dim=1)).all()
    for factor in (-3.0, 0.01, 100.0):
        assert torch.allclose(project_uncond(factor * u, c), nearest, atol=1e-5)
    assert not project_uncond(torch.zeros_like(u), c).any()  # nothing to scale, and no NaN
    assert torch.allclose(project_uncond(c, c), c, atol=1e-6)


def test_rescale_and_projection_judge_each_sample_alone():
    u, c = pair(IMAGES)
    loud = torch.tensor([1.0, 10.0, 100.0]).reshape(3, 1, 1, 1)
    for function in (project_uncond, lambda a, b: rescale_velocity(a, b, 0.5)):
        whole = function(u * loud, c)
        parts = torch.cat([function((u * loud)[i : i + 1], c[i : i + 1]) for i in range(3)])
        assert torch.allclose(whole, parts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("w", [0.0, 1.5, 4.0, 7.5])
def test_parity_with_diffusers(shape, w):
    from diffusers.guiders import ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance
    from diffusers.pipelines.ltx.pipeline_ltx import rescale_noise_cfg

    u, c = pair(shape)
    v = guide(u, c, w)
    assert torch.allclose(v, ClassifierFreeGuidance(guidance_scale=w).forward(c, u).pred, atol=1e-5)
    first_paper = ClassifierFreeGuidance(guidance_scale=w, use_original_formulation=True).forward(c, u).pred
    assert torch.allclose(guide(u, c, 1 + w), first_paper, atol=1e-5)
    assert torch.allclose(rescale_velocity(v, c, 0.7), rescale_noise_cfg(v, c, guidance_rescale=0.7), atol=1e-5)
    star = ClassifierFreeZeroStarGuidance(guidance_scale=w, zero_init_steps=1)
    for step in (0, 1):
        star.set_state(step=step, num_inference_steps=10, timestep=torch.tensor(900))
        ours = guided_velocity(
            lambda x, t, p: torch.cat([u, c]), prompt(1.0), prompt(0.0), w, zero_star=True, zero_above=0.9
        )
        assert torch.allclose(ours(torch.zeros(shape), (1.0, 0.9)[step]), star.forward(c, u).pred, atol=1e-5)
