"""The families' own solvers under harder conditions: every count of steps, every setting, halves, buffers, resuming."""

import json
import math
import shutil

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, DPMSolverMultistepScheduler, UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_engine.memory_manager import LatentBuffer
from diffusion_engine.pipeline import denoise
from diffusion_engine.reference.checkpoint import read_config, read_json
from diffusion_engine.reference.run import Order, Parts, draw, draw_theirs
from diffusion_engine.reference.solvers import (
    DDIM,
    FLOW,
    Look,
    ahead,
    behind,
    ddim_timesteps,
    dpm_schedule,
    dpm_step,
    log_odds,
    moments,
    nearest_steps,
    read_road,
    straight_schedule,
    straighten,
    told_times,
    unipc_step,
)
from diffusion_engine.reference.tiny import write_tiny
from diffusion_engine.scheduler import Schedule, euler_step, make_schedule, shift_sigmas

torch.set_num_threads(1)
WAYS = {"dpm": (dpm_step, DPMSolverMultistepScheduler), "unipc": (unipc_step, UniPCMultistepScheduler)}
ENTRIES = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}


def bent(x, s):
    """A velocity that is no line in x or σ."""
    return torch.sin(2 * x) + (1 - s) * x.cos() - s


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def their_sampler(name, steps, shift=3.0, **entries):
    sampler = WAYS[name][1](**FLOW | {"flow_shift": shift} | entries)
    sampler.set_timesteps(steps)
    return sampler


def their_walk(sampler, x):
    for t, sigma in zip(sampler.timesteps, sampler.sigmas.tolist()):
        x = sampler.step(bent(x, sigma), t, x).prev_sample
    return x


def saved(sampler, folder, **entries):
    sampler.save_pretrained(folder)
    file = folder / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


# --- flows: DPM-Solver++ and UniPC ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 40), shift=st.sampled_from([1.0, 3.0, 5.0, 9.0]))
def test_every_walk_is_theirs(name, steps, shift):
    schedule = dpm_schedule(steps, shift) if name == "dpm" else make_schedule(steps, shift, grid="unipc")
    x = noise(2, 3, 4, 5, seed=steps)
    end = denoise(bent, x, schedule, WAYS[name][0]).latents
    assert (end - their_walk(their_sampler(name, steps, shift), x)).abs().max() < 3e-5


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 7.0])
def test_every_count_of_steps_has_their_stations(shift):
    for steps in (*range(1, 121), 250, 333, 500, 1000):
        theirs, ours = their_sampler("dpm", steps, shift), dpm_schedule(steps, shift)
        assert (ours.sigmas - theirs.sigmas).abs().max() < 1e-6
        assert ours.timesteps.tolist() == theirs.timesteps.tolist()


@pytest.mark.parametrize("name", WAYS)
def test_buffers_halves_ranks_and_batches(name):
    step, schedule = WAYS[name][0], make_schedule(7, 3.0)
    video = noise(2, 3, 4, 5, 6)
    end = denoise(bent, video, schedule, step).latents
    assert torch.equal(denoise(bent, video, schedule, step, buffer=LatentBuffer(video.shape)).latents, end)
    assert torch.equal(denoise(bent, video[:, :, 1], schedule, step).latents, end[:, :, 1])
    assert torch.equal(denoise(bent, video[1:], schedule, step).latents, end[1:])
    half = denoise(bent, video.bfloat16(), schedule, step).latents
    assert half.dtype == torch.bfloat16 and (half.float() - end).abs().mean() < 0.02
    wide = denoise(bent, video.double(), schedule, step).latents
    assert wide.dtype == torch.float64 and (wide - end).abs().max() < 1e-5


@pytest.mark.parametrize("name", WAYS)
def test_stopped_anywhere_and_resumed_is_uninterrupted(name):
    step, schedule, x = WAYS[name][0], make_schedule(6, 2.0), noise(2, 3, 4)
    whole = denoise(bent, x, schedule, step).latents
    for stop in range(1, 6):
        state = denoise(bent, x, schedule, step, lambda info, stop=stop: info.step < stop)
        rest = denoise(bent, state.latents, schedule, step, start=state.step, history=state.history)
        assert state.step == stop and torch.equal(rest.latents, whole)


@pytest.mark.parametrize("name", WAYS)
def test_one_step_is_eulers_and_a_known_guess_is_landed_on(name):
    step, x, data = WAYS[name][0], noise(1, 4, 4), noise(1, 4, 4, seed=1)
    assert torch.allclose(denoise(bent, x, make_schedule(1), step).latents, euler_step(bent, x, 1.0, 0.0).latents)
    for schedule in (make_schedule(9, 3.0), make_schedule(9, 3.0, grid="unipc"), dpm_schedule(9)):
        end = denoise(lambda x, s: (x - data) / s, x, schedule, step).latents  # a network that knows the answer
        assert torch.allclose(end, data, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(h=st.floats(1e-3, 30))
def test_moments_lie_where_weights_put_them(h):
    first, second = moments(h)
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    weights = (h * (u - 1)).exp()
    for found, power in ((first, 1), (second, 2)):
        assert abs(found - (weights * u**power).sum() / weights.sum()) < 1e-5
    assert 0.5 <= first + 1e-9 and second <= first + 1e-9  # the end weighs more


def test_a_parabola_in_lambda_is_met_exactly_behind():
    sigmas = (0.25, 0.5, 0.8)  # newest first
    lam = [log_odds(s) for s in sigmas]
    looks = [Look(s, torch.tensor([2 * x**2 - x + 3], dtype=torch.float64)) for s, x in zip(sigmas, lam)]
    points = torch.linspace(lam[1], lam[0], 200_001, dtype=torch.float64)
    weights = points.exp()
    truth = ((2 * points**2 - points + 3) * weights).sum() / weights.sum()
    assert abs(behind(looks).item() - truth) < 1e-4
    assert torch.equal(ahead(looks[:1], 0.1), looks[0].data) and torch.equal(ahead(looks, 0.0), looks[0].data)
    assert behind(looks[:2]) == (looks[0].data + looks[1].data) / 2


def test_a_start_at_pure_noise_stays_finite():
    """λ is −∞ there: the memory of that look has no weight."""
    for step in (dpm_step, unipc_step):
        end = denoise(bent, noise(2, 8), make_schedule(5), step).latents
        assert end.isfinite().all()
    looks = (Look(0.5, torch.ones(1)), Look(0.8, torch.zeros(1)), Look(1.0, torch.full((1,), 99.0)))
    assert torch.equal(ahead(looks[1:], 0.5), torch.zeros(1)) and behind(looks).isfinite().all()


# --- reading a folder's way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
def test_a_folder_is_followed(name, tmp_path):
    sampler = their_sampler(name, 12, 5.0)
    schedule, solver = read_road(saved(sampler, tmp_path), 12)
    assert solver is WAYS[name][0] and (schedule.sigmas - sampler.sigmas).abs().max() < 1e-6
    assert schedule.timesteps.tolist() == sampler.timesteps.tolist()


def test_euler_folders_keep_their_grid(tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler

    folder = saved(FlowMatchEulerDiscreteScheduler(shift=3.0), tmp_path)
    for grid in ("even", "double"):
        road = read_road(folder, 6, grid=grid)
        assert road == (Schedule.from_config(folder, 6, grid=grid), euler_step)


@pytest.mark.parametrize(
    ("name", "entries", "needle"),
    [
        (
            "dpm",
            {"algorithm_type": "sde-dpmsolver++"},
            "algorithm_type = 'sde-dpmsolver\\+\\+'.*only 'dpmsolver\\+\\+'",
        ),
        ("dpm", {"solver_order": 3}, "solver_order = 3 .*only 2 is"),
        ("dpm", {"solver_type": "heun"}, "'heun'.*only 'midpoint'"),
        ("dpm", {"use_lu_lambdas": True}, "use_lu_lambdas = True"),
        ("dpm", {"final_sigmas_type": "sigma_min"}, "only 'zero'"),
        ("dpm", {"use_flow_sigmas": False}, "use_flow_sigmas = False .*only True"),
        ("dpm", {"prediction_type": "epsilon"}, "'epsilon'.*only 'flow_prediction'"),
        ("dpm", {"new_trick": 1}, "setting new_trick is unknown"),
        ("dpm", {"flow_shift": 0}, "shift 0"),
        ("unipc", {"solver_order": 3}, "solver_order = 3 .*only 2 is"),
        ("unipc", {"solver_type": "bh1"}, "'bh1'.*only 'bh2'"),
        ("unipc", {"predict_x0": False}, "predict_x0 = False"),
        ("unipc", {"disable_corrector": [0]}, "disable_corrector = \\[0\\]"),
        ("unipc", {"lower_order_final": False}, "lower_order_final = False"),
        ("unipc", {"new_trick": 1}, "setting new_trick is unknown"),
        ("unipc", {"_class_name": "HeunDiscreteScheduler"}, "'HeunDiscreteScheduler' is not supported; try Flow"),
        ("unipc", {"_class_name": None}, "None is not supported"),
    ],
)
def test_what_is_not_built_is_refused(name, entries, needle, tmp_path):
    with pytest.raises(ValueError, match=needle):
        read_road(saved(their_sampler(name, 5), tmp_path, **entries), 5)


def test_a_folder_without_a_scheduler_and_a_wrong_count(tmp_path):
    with pytest.raises(ValueError, match="scheduler_config.json is missing"):
        read_road(tmp_path, 5)
    folder = saved(their_sampler("dpm", 5), tmp_path)
    for steps in (0, 1001, 2.5, -1):
        with pytest.raises(ValueError, match="num_inference_steps"):
            read_road(folder, steps)


@pytest.mark.parametrize("schedule", [dpm_schedule(13, 3.0), make_schedule(13, 5.0, grid="unipc"), make_schedule(13)])
def test_every_station_is_told_its_own_time(schedule):
    sigmas = schedule.sigmas[:-1]
    heard = told_times(lambda x, t, *more, **named: (t, more, named), schedule)
    t, more, named = heard(noise(13, 1), 1000 * sigmas, "text", mask=None)
    assert torch.equal(t, schedule.timesteps) and more == ("text",) and named == {"mask": None}


@pytest.mark.parametrize("name", ["sana", "wan"])
@pytest.mark.parametrize("scheduler", ["FlowMatchEulerDiscreteScheduler", "own"])
def test_pipelines_agree_under_their_own_and_under_eulers_way(name, scheduler, tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler

    folder, order = write_tiny(name, tmp_path / name), Order(steps=6, height=64, width=64, frames=1)
    if scheduler != "own":
        shutil.rmtree(folder / "scheduler")
        FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
        index = json.loads((folder / "model_index.json").read_text())
        index["scheduler"][1] = scheduler
        (folder / "model_index.json").write_text(json.dumps(index))
    theirs, _ = draw_theirs(Parts(folder, name), order)
    for hoist in (False, True):
        assert (draw(Parts(folder, name, hoist=hoist), order).latents - theirs).abs().max() < 1e-4


# --- CogVideoX: DDIM on a straight road ----------------------------------------------------------------------------


def their_ddim(**entries):
    return CogVideoXDDIMScheduler(**ENTRIES | entries)


def known(ddim: DDIM, spread: float = 0.5):
    """The best v-prediction for data N(0, spread²); t may be any whole steps, one a sample."""

    def network(x, t):
        angle = ddim.angles[t.long()].reshape(-1, *[1] * (x.ndim - 1)).float()
        share = spread**2 / (spread**2 * angle.cos() ** 2 + angle.sin() ** 2)
        return angle.cos() * (1 - share) / angle.sin() * x  # from x0 = share · cos φ · x = cos φ · x − sin φ · v

    return network


def on_the_road(flow):
    return lambda y, s: flow(y, torch.full((len(y),), 1000 * s))


@pytest.mark.parametrize("entries", [{}, {"snr_shift_scale": 1.0}, {"rescale_betas_zero_snr": False}])
def test_noise_levels_are_theirs(entries):
    ours, theirs = DDIM(**ENTRIES | entries), their_ddim(**entries)
    assert (ours.alphas_cumprod - theirs.alphas_cumprod).abs().max() < 1e-12
    assert (ours.angles.cos() ** 2 - theirs.alphas_cumprod).abs().max() < 1e-12


def test_times_are_theirs_ties_included():
    theirs, longer = their_ddim(), []
    for steps in (*range(1, 130), *range(144, 1001, 16), 999, 1000):  # multiples of 16 have ties
        theirs.set_timesteps(steps)
        assert ddim_timesteps(steps) == theirs.timesteps.tolist()[:steps]
        longer += [steps] if len(theirs.timesteps) > steps else []
    assert 61 in longer and 50 not in longer  # there diffusers takes one more step, at t = −1


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 8, 10, 20, 25, 40, 50, 100, 125])
def test_the_straight_road_is_theirs_where_steps_divide(steps):
    ddim, theirs, start = DDIM(**ENTRIES), their_ddim(), noise(1, 4, 2, 2, 2, seed=steps)
    theirs.set_timesteps(steps)
    network, x = known(ddim), start
    for t in theirs.timesteps:
        x = theirs.step(network(x, t[None]), t, x).prev_sample
    y = denoise(on_the_road(straighten(network, ddim)), start, straight_schedule(ddim, steps)).latents
    assert (x - y).abs().max() < 1e-5


def test_the_road_runs_from_noise_to_data():
    for steps in (1, 7, 50, 1000):
        levels = straight_schedule(DDIM(**ENTRIES), steps).values
        assert levels[0] == 1 and levels[-1] == 0 and len(levels) == steps + 1


def test_the_road_asks_the_network_for_every_training_step():
    """t = 1000 · s in fp32 finds its own step again, each of the thousand, a batch at a time."""
    ddim, heard = DDIM(**ENTRIES), []

    def network(x, t, *rest, **more):
        heard.append((t, rest, more))
        return torch.zeros_like(x)

    straighten(network, ddim)(noise(1000, 1, 1), (1000 * ddim.sigmas).float(), "text", pooled="unused")
    assert heard[0][0].tolist() == list(range(1000)) and heard[0][1:] == (("text",), {"pooled": "unused"})
    assert torch.equal(nearest_steps(ddim, ddim.sigmas.float()), heard[0][0])


def test_what_is_known_of_noise_and_data_survives_the_road():
    """A network that knows x0 and ε exactly gives the same velocity ε − x0 everywhere."""
    ddim, (data, eps) = DDIM(**ENTRIES), noise(2, 1000, 3, 2, seed=5)
    s = ddim.sigmas.float().reshape(-1, 1, 1)
    angle = ddim.angles.float().reshape(-1, 1, 1)
    velocity = straighten(lambda x, t: angle.cos() * eps - angle.sin() * data, ddim)
    assert (velocity((1 - s) * data + s * eps, 1000 * s.flatten()) - (eps - data)).abs().max() < 1e-4


@pytest.mark.parametrize(("solver", "share"), [("heun", 0.5), ("multistep", 0.5), (dpm_step, 0.8), (unipc_step, 0.8)])
def test_the_other_solvers_walk_the_road(solver, share):
    """Those that end with Euler keep its last error: the last of DDIM's steps is long in λ."""
    ddim, start = DDIM(**ENTRIES), noise(4, 50, seed=1)
    flow = on_the_road(straighten(known(ddim), ddim))
    ends = [denoise(flow, start, straight_schedule(ddim, 50), s).latents for s in ("euler", solver)]
    errors = [(end - start / 2).abs().mean() for end in ends]
    assert errors[1] < share * errors[0]


def test_schedulers_that_are_not_built():
    for entries, needle in (
        ({"prediction_type": "epsilon"}, "prediction_type 'epsilon'.*'v_prediction'"),
        ({"timestep_spacing": "leading"}, "'leading'.*'trailing'"),
        ({"beta_schedule": "linear"}, "scaled_linear"),
        ({"num_train_timesteps": 100}, "1000"),
    ):
        with pytest.raises(ValueError, match=needle):
            DDIM(**ENTRIES | entries)
    with pytest.raises(ValueError, match="rescale_betas_zero_snr False"):
        straight_schedule(DDIM(**ENTRIES | {"rescale_betas_zero_snr": False}), 5)
    for steps in (0, 1001, -3, 2.5):
        with pytest.raises(ValueError, match="num_inference_steps"):
            ddim_timesteps(steps)
    with pytest.raises(ValueError, match="trained_betas"):
        read_config(DDIM, ENTRIES | {"trained_betas": [0.1]})


def test_their_file_is_read(tmp_path):
    their_ddim(snr_shift_scale=1.0).save_pretrained(tmp_path)
    assert read_config(DDIM, read_json(tmp_path / "scheduler_config.json")) == DDIM(**ENTRIES, snr_shift_scale=1.0)


def test_shifting_the_share_of_noise_multiplies_the_odds():
    plain, shifted = (DDIM(**ENTRIES | {"snr_shift_scale": k, "rescale_betas_zero_snr": False}) for k in (1.0, 3.0))
    assert torch.allclose(shift_sigmas(1 - plain.alphas_cumprod, 3.0), 1 - shifted.alphas_cumprod)
    assert math.isclose(DDIM(**ENTRIES).angles[-1], math.pi / 2)
