"""Harder truths for chapter 02: parity with diffusers over many settings, every kind of bad input, solvers on any rank and dtype."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_engine.scheduler import (
    GRIDS,
    SOLVER_CALLS,
    SOLVERS,
    SPACINGS,
    Schedule,
    dynamic_mu,
    euler_step,
    make_schedule,
    multistep_step,
    shift_sigmas,
)

EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.39.0"}
UNIPC = {
    **{"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True},
    **{"flow_shift": 3.0, "solver_order": 2, "beta_schedule": "linear", "timestep_spacing": "linspace"},
}


def sample(step, x, schedule, velocity):
    history = ()
    for sigma, sigma_next in schedule:
        x, _, history = step(velocity, x, sigma, sigma_next, history)
    return x


def cloud(x, s, tau=1.5, centre=2.0):
    return -centre + (s - (1 - s) * tau**2) / ((1 - s) ** 2 * tau**2 + s**2) * (x - (1 - s) * centre)


# schedules -----------------------------------------------------------------------------------------------------------


@given(
    steps=st.integers(1, 200),
    shift=st.floats(0.1, 12),
    terminal=st.none() | st.floats(0.01, 0.3),
    spacing=st.sampled_from(SPACINGS),
    grid=st.sampled_from(GRIDS),
)
@settings(max_examples=100, deadline=None)
def test_every_schedule_falls_from_noise_to_zero(steps, shift, terminal, spacing, grid):
    schedule = make_schedule(steps, shift, None, terminal, spacing, grid)
    sigmas = schedule.sigmas
    assert len(sigmas) == steps + 1 and sigmas[-1] == 0 and abs(sigmas[0] - 1) <= 1.1e-6
    assert (sigmas.diff() < 0).all() and sigmas.isfinite().all() and sigmas.dtype == torch.float32
    assert schedule.num_steps == steps == len(list(schedule)) == len(schedule.timesteps)
    assert schedule == make_schedule(steps, shift, None, terminal, spacing, grid)  # a value: the same call, the same
    if terminal is not None and steps > 1:
        assert math.isclose(schedule.values[-2], terminal, rel_tol=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 7, 28, 100, 1000])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"shift": 3.0},
        {"shift": 7.0, "shift_terminal": 0.1},
        {"shift": 3.0, "use_karras_sigmas": True},
        {"shift": 3.0, "use_exponential_sigmas": True},
    ],
    ids=str,
)
def test_static_schedules_equal_diffusers(config, steps):
    if steps == 1 and "shift_terminal" in config:
        pytest.skip("diffusers gives NaN for one stretched step; ours is [1, 0]")
    theirs = FlowMatchEulerDiscreteScheduler(**config)
    theirs.set_timesteps(steps)
    ours = Schedule.from_config({**EULER, **theirs.config}, steps, grid="double")
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.timesteps, theirs.timesteps, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("terminal", [None, 0.02])
def test_dynamic_schedules_equal_diffusers(kind, terminal):
    line = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    theirs = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, time_shift_type=kind, shift_terminal=terminal, **line
    )
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / 12, 12), mu=dynamic_mu(2000, 1024, 4096, 0.95, 2.05))
    ours = Schedule.from_config({**EULER, **theirs.config}, 12, num_tokens=2000)
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    theirs.set_timesteps(12, mu=dynamic_mu(2000, 1024, 4096, 0.95, 2.05))  # without sigmas: down to 1/1000
    ours = Schedule.from_config({**EULER, **theirs.config}, 12, num_tokens=2000, grid="trained")
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [2, 8, 50, 200])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_unipc_flow_equals_diffusers(steps, shift):
    theirs = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=shift, prediction_type="flow_prediction")
    theirs.set_timesteps(steps)
    ours = Schedule.from_config({**UNIPC, **theirs.config}, steps)
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    assert ours.timesteps.tolist() == theirs.timesteps.tolist()


def test_given_sigmas_are_the_base_grid():
    mine = [1.0, 0.9, 0.4]
    theirs = FlowMatchEulerDiscreteScheduler(shift=2.0)
    theirs.set_timesteps(sigmas=mine)
    torch.testing.assert_close(make_schedule(shift=2.0, sigmas=mine).sigmas, theirs.sigmas, atol=1e-6, rtol=0)
    assert make_schedule(3, sigmas=torch.tensor(mine)).num_steps == 3
    assert make_schedule(sigmas=[0.8]).values == (0.8, 0.0)


def test_beta_is_symmetric_and_starts_and_ends_where_linear_does():
    beta = make_schedule(9, 3.0, spacing="beta", grid="trained").values[:-1]
    linear = make_schedule(9, 3.0, grid="trained").values[:-1]
    assert beta[0] == linear[0] and math.isclose(beta[-1], linear[-1])
    for a, b in zip(beta, reversed(beta)):
        assert math.isclose(a + b, beta[0] + beta[-1], rel_tol=1e-9)


def test_schedule_is_immutable():
    schedule = make_schedule(4)
    for change in (lambda: setattr(schedule, "values", (1.0, 0.0)), lambda: setattr(schedule, "step", 1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    schedule.sigmas.zero_(), schedule.timesteps.zero_()
    assert schedule.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0] and hash(schedule) == hash(make_schedule(4))


@given(st.floats(0.01, 50), st.floats(0.01, 50), st.floats(0, 1))
@settings(deadline=None)
def test_shifts_multiply(a, b, sigma):
    assert math.isclose(
        shift_sigmas(shift_sigmas(sigma, a), b), shift_sigmas(sigma, a * b), rel_tol=1e-9, abs_tol=1e-12
    )


def test_mu_and_shift_are_one():
    assert make_schedule(7, mu=1.15).values == make_schedule(7, shift=math.exp(1.15)).values
    assert math.isclose(dynamic_mu(8192), 1.15 + 4096 * 0.65 / 3840)  # the line goes on


# bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1, 1001, 10**9, 4.5, 4.0, math.nan, math.inf, True, "4", None, [4]])
def test_bad_step_counts(steps):
    with pytest.raises(ValueError, match=r"not a whole number within 1…1000; try \d+$"):
        make_schedule(steps)


def test_bad_terminal_is_bad_for_one_step_too():
    with pytest.raises(ValueError, match="terminal"):
        make_schedule(1, terminal=2.0)


def test_step_errors_name_the_nearest_count():
    for steps, near in ((0, 1), (-7, 1), (4.4, 4), (5000, 1000), (10**400, 1000)):
        with pytest.raises(ValueError, match=f"try {near}$"):
            make_schedule(steps)
    assert make_schedule(np.int64(4)) == make_schedule(4)


@pytest.mark.parametrize(
    "options",
    [
        {"shift": 0.0},
        {"shift": -3.0},
        {"shift": math.nan},
        {"shift": math.inf},
        {"mu": math.nan},
        {"mu": 1e6},
        {"mu": 1.0, "shift": 3.0},
        {"terminal": 0.0},
        {"terminal": 1.0},
        {"terminal": -0.1},
        {"terminal": math.nan},
        {"spacing": "cosine"},
        {"grid": "odd"},
        {"sigmas": []},
        {"sigmas": [1.0, 0.5, 0.25, 0.0]},
        {"sigmas": [1.0, 0.5, 0.6, 0.2]},
        {"sigmas": [1.2, 0.5, 0.3, 0.2]},
        {"sigmas": [1.0, 0.5]},
        {"sigmas": [1.0, math.nan, 0.3, 0.1]},
        {"sigmas": [[1.0, 0.5, 0.3, 0.1]]},
    ],
    ids=str,
)
def test_bad_options(options):
    with pytest.raises(ValueError, match="try|must"):
        make_schedule(4, **options)


@pytest.mark.parametrize("tokens", [0, -5])
def test_bad_tokens(tokens):
    with pytest.raises(ValueError, match="try 4096"):
        dynamic_mu(tokens)


# configs -------------------------------------------------------------------------------------------------------------


def test_config_as_file_folder_and_dict(tmp_path):
    config = EULER | {"shift": 3.0, "num_train_timesteps": 1000, "shift_terminal": None}
    path = tmp_path / "scheduler_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    expected = make_schedule(28, 3.0)
    assert Schedule.from_config(path, 28) == expected == Schedule.from_config(str(tmp_path), 28)
    assert Schedule.from_config(config, 28, num_tokens=99) == expected
    assert Schedule.from_config(config, sigmas=[1.0, 0.5]) == make_schedule(2, 3.0)
    for text in ("{", "[]", '"x"', "\x00"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="scheduler_config.json|scheduler class"):
            Schedule.from_config(path, 4)
    with pytest.raises(ValueError, match="scheduler_config.json"):
        Schedule.from_config(tmp_path / "nowhere", 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"invert_sigmas": True}, "invert_sigmas"),
        ({"stochastic_sampling": True}, "stochastic_sampling"),
        ({"num_train_timesteps": 500}, "num_train_timesteps"),
        ({"use_karras_sigmas": True, "use_beta_sigmas": True}, "karras and beta"),
        ({"use_dynamic_shifting": True}, "num_tokens"),
        ({"shfit": 3.0}, "shfit"),
        ({"flow_shift": 3.0}, "flow_shift"),
        ({"shift": "3"}, "shift"),
        ({"shift": None}, "shift"),
        ({"shift_terminal": True}, "shift_terminal"),
        ({"_class_name": "DPMSolverMultistepScheduler"}, "DPMSolver"),
        ({"_class_name": None}, "class None"),
        ({"_class_name": []}, "class"),
    ],
    ids=str,
)
def test_euler_settings_refused(change, named):
    with pytest.raises(ValueError, match=named):
        Schedule.from_config(EULER | change, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"prediction_type": "epsilon"},
        {"use_flow_sigmas": False},
        {"use_karras_sigmas": True},
        {"use_dynamic_shifting": True},
        {"final_sigmas_type": "sigma_min"},
        {"thresholding": True},
        {"shift": 3.0},
    ],
    ids=str,
)
def test_unipc_settings_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Schedule.from_config(UNIPC | change, 4)
    assert Schedule.from_config(UNIPC, 4) == make_schedule(4, 3.0, grid="unipc")


def test_what_unipc_leaves_out_is_not_guessed():
    for key in ("prediction_type", "use_flow_sigmas"):
        with pytest.raises(ValueError, match=key):
            Schedule.from_config({k: v for k, v in UNIPC.items() if k != key}, 4)


# solvers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("options", [{}, {"shift": 3.0}, {"shift": 3.0, "spacing": "beta"}], ids=str)
def test_slopes(name, options):
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = [
        (sample(SOLVERS[name], noise, make_schedule(n, **options), cloud) - 2 - 1.5 * noise).abs().mean().item()
        for n in (200, 400)
    ]
    assert abs(math.log2(errors[1] / errors[0]) + (1 if name == "euler" else 2)) < 0.15


@pytest.mark.parametrize("name", SOLVERS)
def test_calls_first_velocity_and_nothing_remembered(name):
    calls = []

    def velocity(x, s):
        calls.append(s)
        return cloud(x, s)

    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    schedule, kept, first = make_schedule(5, 3.0), x.clone(), SOLVERS[name](cloud, x, 1.0, 0.9, ())
    one = sample(SOLVERS[name], x, schedule, velocity)
    assert len(calls) == 5 * SOLVER_CALLS[name] and calls[0] == 1.0
    assert torch.equal(one, sample(SOLVERS[name], x, schedule, velocity))  # no state outside history
    assert torch.equal(x, kept) and torch.equal(first.velocity, cloud(x, 1.0))
    assert isinstance(first.history, tuple)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("shape", [(3,), (2, 4, 8, 6), (2, 4, 5, 8, 6)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_rank_and_dtype_batch_equals_single(name, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    schedule = make_schedule(6, 3.0)
    end = sample(SOLVERS[name], x, schedule, cloud)
    assert end.dtype == dtype and end.shape == shape
    assert torch.equal(end[-1:], sample(SOLVERS[name], x[-1:], schedule, cloud))


@pytest.mark.parametrize("name", SOLVERS)
def test_resume_is_bit_identical(name):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    pairs = list(make_schedule(8, 3.0))

    def walk(x, history, pairs):
        for sigma, sigma_next in pairs:
            x, _, history = SOLVERS[name](cloud, x, sigma, sigma_next, history)
        return x, history

    assert torch.equal(walk(*walk(x, (), pairs[:3]), pairs[3:])[0], walk(x, (), pairs)[0])


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.floats(-5, 5), st.floats(-5, 5))
@settings(deadline=None)
def test_multistep_is_exact_where_velocity_is_linear_in_time(a, b, c, d):
    sigma, sigma_next = max(a, b), min(a, b)
    if sigma - sigma_next < 1e-3:
        return

    def whole(s):  # x(σ) with v = c + d·σ
        return torch.tensor([c * s + d * s * s / 2], dtype=torch.float64)

    step = multistep_step(
        lambda x, s: torch.full_like(x, c + d * s),
        whole(sigma),
        sigma,
        sigma_next,
        (torch.tensor([c + d], dtype=torch.float64), sigma - 1),
    )
    torch.testing.assert_close(step.latents, whole(sigma_next), atol=1e-10, rtol=0)


def test_one_euler_step_equals_predicted_data():
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(4))
    step = euler_step(cloud, x, 0.7, 0.0)
    torch.testing.assert_close(step.latents, x - 0.7 * step.velocity)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 4, 3, 8, 8)])
def test_euler_loop_equals_diffusers(shape):
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    schedule = make_schedule(20, 3.0, grid="double")

    def walks(dtype):
        theirs.set_timesteps(20)
        x = y = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
        for t, (sigma, sigma_next) in zip(theirs.timesteps, schedule):
            x = euler_step(cloud, x, sigma, sigma_next).latents
            y = theirs.step(cloud(y, sigma), t, y).prev_sample
        return x.float(), y.float()

    ours, exact = walks(torch.float32)
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=0)
    ours, other = walks(torch.bfloat16)  # theirs rounds the product to bf16 before the sum
    assert (ours - exact).abs().mean() < 1.05 * (other - exact).abs().mean()
