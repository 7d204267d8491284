"""The pipeline alone: plain callables, no model; and the chapter's checks, shown to catch faults that keep every shape."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_engine.pipeline import (
    NotFiniteError,
    Result,
    StepInfo,
    Stopwatch,
    denoise,
    generate,
    initial_noise,
    require_finite,
    to_pictures,
)
from diffusion_engine.scheduler import SOLVER_CALLS, SOLVERS, make_schedule

SHAPE = (2, 4, 6)


def bent(x, sigma):
    """A smooth velocity without a closed form; every sample alone."""
    return torch.sin(3 * x + sigma) - 0.5 * x * sigma


# Noise


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_noise_does_not_depend_on_the_batch(seeds, data):
    i = data.draw(st.integers(0, len(seeds) - 1))
    before = torch.get_rng_state()
    batch = initial_noise(seeds, SHAPE)
    assert torch.equal(batch[i], initial_noise([seeds[i]], SHAPE)[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert batch.dtype == torch.float32 and batch.isfinite().all()


def test_small_seeds_are_torchs_own():
    for seed in (0, 1, 2**31, 2**32 - 1):
        expected = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(initial_noise([seed], SHAPE), expected)


def test_seeds_that_share_their_lower_bits_differ():
    noise = initial_noise([5 + k * 2**32 for k in range(4)], (4096,))
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.08
    assert (noise.std(dim=1) - 1).abs().max() < 0.05


@pytest.mark.parametrize("seed", [-1, 2**64, 0.0, "1", None, True])
def test_seeds_that_are_none(seed):
    with pytest.raises(ValueError, match="64-bit"):
        initial_noise([seed], SHAPE)


# The loop


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 4, 4), (2, 2, 3, 4, 4)])
def test_the_loop_is_the_solver_by_hand(solver, shape):
    noise, schedule = torch.randn(shape, generator=torch.Generator().manual_seed(0)), make_schedule(5, shift=2.0)
    x, history = noise, ()
    for sigma, sigma_next in schedule:
        x, _, history = SOLVERS[solver](bent, x, sigma, sigma_next, history)
    state = denoise(bent, noise, schedule, solver)
    assert torch.equal(state.latents, x) and state.step == 5 and not state.cancelled


@given(st.integers(1, 12), st.data(), st.sampled_from(sorted(SOLVERS)))
@settings(max_examples=40, deadline=None)
def test_stopped_anywhere_and_resumed_is_uninterrupted(count, data, solver):
    noise, schedule = initial_noise([0, 1], SHAPE), make_schedule(count)
    whole = denoise(bent, noise, schedule, solver)
    stops = sorted(data.draw(st.sets(st.integers(1, count), max_size=3)))
    step, history, x = 0, (), noise
    for stop in stops:
        state = denoise(bent, x, schedule, solver, lambda info, stop=stop: info.step < stop, step, history)
        assert state.cancelled and state.step == stop
        x, step, history = state.latents, state.step, state.history
    resumed = denoise(bent, x, schedule, solver, start=step, history=history)
    assert torch.equal(resumed.latents, whole.latents) and not resumed.cancelled


def test_only_false_cancels():
    def cancelled(answer) -> bool:
        return denoise(bent, initial_noise([0], SHAPE), make_schedule(2), callback=lambda info: answer).cancelled

    assert not any(map(cancelled, (None, True, 0, "", [], np.True_, torch.tensor(True), torch.zeros(2))))
    assert all(map(cancelled, (False, np.False_, torch.tensor(False))))


def test_whole_numbers_are_not_pictures():
    with pytest.raises(ValueError, match="uint8; expected floats in −1…1"):
        to_pictures(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))


def test_a_callback_costs_no_model_call_and_changes_nothing():
    for solver, calls in SOLVER_CALLS.items():
        counted = []

        def velocity(x, sigma, counted=counted):
            counted.append(sigma)
            return bent(x, sigma)

        noise, schedule = initial_noise([0], SHAPE), make_schedule(4)
        watched = denoise(velocity, noise, schedule, solver, callback=lambda info: None)
        assert len(counted) == 4 * calls
        assert torch.equal(watched.latents, denoise(bent, noise, schedule, solver).latents)


def test_the_noise_is_not_written_to():
    noise = initial_noise([0], SHAPE)
    kept = noise.clone()
    denoise(bent, noise, make_schedule(3))
    assert torch.equal(noise, kept)


def test_no_gradient_is_kept():
    weight = torch.ones(1, requires_grad=True)
    state = denoise(lambda x, s: weight * x, initial_noise([0], SHAPE), make_schedule(2))
    assert not state.latents.requires_grad and torch.is_grad_enabled()


def test_bad_calls_of_the_loop():
    noise = initial_noise([0], SHAPE)
    with pytest.raises(ValueError, match="euler, heun, multistep"):
        denoise(bent, noise, make_schedule(2), "eular")
    for start in (-1, 3):
        with pytest.raises(ValueError, match="outside 0 … 2"):
            denoise(bent, noise, make_schedule(2), start=start)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("solver", SOLVERS)
def test_what_is_not_finite_names_the_step(value, solver):
    def velocity(x, sigma):
        v = bent(x, sigma)
        if sigma < 0.6:
            v[1, 0, 0, 0] = value
        return v

    with pytest.raises(NotFiniteError, match="denoise, step [34] of 5"):
        denoise(velocity, initial_noise([0, 1], SHAPE), make_schedule(5), solver)


def test_finite_looks_into_nested_values():
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert require_finite((good, [good], torch.tensor([True]), None, 3), "encode")
    for value in (bad, (good, bad), [[(bad,)]]):
        with pytest.raises(NotFiniteError, match="encode"):
            require_finite(value, "encode")


# Pictures


def test_every_byte_survives():
    levels = torch.arange(256).float()
    images = (levels / 127.5 - 1).reshape(1, 1, 16, 16)
    assert list(to_pictures(images)[0].tobytes()) == list(range(256))
    assert to_pictures(images.to(torch.float64))[0].tobytes() == to_pictures(images)[0].tobytes()


def test_rows_columns_and_channels_keep_their_places():
    images = torch.full((2, 3, 4, 6), -1.0)
    images[1, 2, 3, 0] = 1.0  # picture 1: blue, last row, first column
    picture = to_pictures(images)[1]
    assert picture.size == (6, 4) and picture.getpixel((0, 3)) == (0, 0, 255) and picture.getpixel((3, 0)) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 2, 4, 4), (1, 4, 4, 3)])
def test_shapes_that_are_no_pictures(shape):
    with pytest.raises(ValueError, match="expected"):
        to_pictures(torch.zeros(shape))


# The whole line


def line(prompts=("a", "bb"), seeds=(0, 1), steps=4, **changes) -> Result:
    parts = {
        "encode": lambda prompts: torch.tensor([len(p) / 4 for p in prompts]),
        "velocity": lambda c: lambda x, sigma: bent(x, sigma) * c.reshape(-1, 1, 1, 1),
        "decode": lambda x: x.clamp(-1, 1)[:, :1],
        "shape": SHAPE,
    }
    return generate(list(prompts), list(seeds), make_schedule(steps), **(parts | changes))


def test_each_picture_has_its_prompt_and_its_seed():
    both, alone = line(), line(["bb"], [1])
    assert torch.equal(both.latents[1], alone.latents[0]) and both.images[1].tobytes() == alone.images[0].tobytes()
    assert not torch.equal(both.latents[0], line(["bb"], [0]).latents[0])
    assert both.seeds == (0, 1) and both.step == 4 and both.sigmas.tolist()[0] == 1 and len(both.sigmas) == 5


def test_the_stages_are_timed_in_order():
    result = line()
    assert list(result.seconds) == ["encode", "noise", "denoise", "decode"] and min(result.seconds.values()) >= 0
    stopped = line(callback=lambda info: False)
    assert list(stopped.seconds) == ["encode", "noise", "denoise"] and stopped.images == [] and stopped.step == 1


def test_a_meter_of_ones_own():
    watch = Stopwatch()
    for _ in range(2):
        line(meter=watch)
    with watch("extra"):
        pass
    assert list(watch.seconds) == ["encode", "noise", "denoise", "decode", "extra"]


def test_the_stopwatch_waits_for_the_device():
    waits = []
    with Stopwatch(lambda: waits.append(1))("decode"):
        assert len(waits) == 1
    assert len(waits) == 2


def test_given_latents_are_the_first_noise():
    noise = initial_noise([0, 1], SHAPE)
    assert torch.equal(line(latents=noise).latents, line().latents)
    assert not torch.equal(line(latents=noise + 1).latents, line().latents)


@pytest.mark.parametrize("shape", [(1, *SHAPE), (2, 2, 4), (2, 2, 6, 4), (3, *SHAPE)])
def test_latents_of_another_shape(shape):
    with pytest.raises(ValueError, match=re.escape(str((2, *SHAPE)))):
        line(latents=torch.zeros(shape))


def test_counts_that_do_not_fit():
    for prompts, seeds in (([], []), (["a"], [0, 1])):
        with pytest.raises(ValueError, match="give one each"):
            line(prompts, seeds)


def test_a_nan_names_its_stage():
    nan = float("nan")
    places = {
        "encode": {"encode": lambda prompts: (torch.ones(2), torch.tensor([1.0, nan]))},
        "noise": {"latents": torch.full((2, *SHAPE), nan)},
        "denoise, step 1 of 4": {"velocity": lambda c: lambda x, sigma: x * nan},
        "decode": {"decode": lambda x: x[:, :1] / 0},
    }
    for stage, change in places.items():
        with pytest.raises(NotFiniteError, match=f"^{stage}"):
            line(**change)


def test_resume_through_generate_twice():
    whole = line(solver="multistep", steps=6)
    first = line(solver="multistep", steps=6, callback=lambda info: info.step < 2)
    second = line(solver="multistep", steps=6, resume=first, callback=lambda info: info.step < 5)
    last = line(solver="multistep", steps=6, resume=second)
    assert (first.step, second.step, last.step) == (2, 5, 6)
    assert torch.equal(last.latents, whole.latents) and last.images[1].tobytes() == whole.images[1].tobytes()


def test_step_info_has_names():
    seen: list[StepInfo] = []
    line(callback=seen.append)
    assert [info.step for info in seen] == [1, 2, 3, 4] and seen[-1].sigma == 0
    assert all(info.latents.shape == info.data.shape == (2, *SHAPE) for info in seen)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_velocity_that_only_broadcasts_is_refused(solver):
    with pytest.raises(ValueError, match=r"velocity has shape \(1, 4\); expected \(3, 4\)"):
        denoise(lambda x, sigma: x[:1], torch.zeros(3, 4), make_schedule(2), solver)
