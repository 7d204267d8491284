"""Chapter 12's module, harder: what counts as a byte, buffers under every solver, formulas on other nets, plans that are kept."""

import gc
import re
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_engine.dit import DiT, DiTConfig
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import (
    LatentBuffer,
    LiveBytes,
    PeakMeter,
    activation_bytes,
    checkpointed,
    decode_bytes,
    format_bytes,
    latent_bytes,
    parse_bytes,
    plan_memory,
    planned_decode,
    storages,
    tensor_bytes,
    weight_bytes,
)
from diffusion_engine.pipeline import Stopwatch, denoise, generate, initial_noise
from diffusion_engine.scheduler import SOLVERS, make_schedule
from diffusion_engine.text_conditioning import PromptEmbeds
from diffusion_engine.vae import VAE, VAEConfig, tiled_decode

torch.set_num_threads(1)
SHAPE = (2, 3, 8, 8)


def bent(x, sigma):
    return torch.sin(3 * x) + sigma


def prompts(batch: int, tokens: int, width: int) -> PromptEmbeds:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(tokens) < torch.arange(tokens, tokens - batch, -1).clamp_min(1)[:, None]
    random = partial(torch.randn, generator=generator)
    return PromptEmbeds(random(batch, tokens, width), mask, random(batch, width))


# What counts


@pytest.mark.parametrize(
    "look",
    [
        lambda w: w.t(),
        lambda w: w[1:, ::2],
        lambda w: w.expand(3, 8, 8),
        lambda w: w.detach().unbind(),
        lambda w: torch.nn.functional.linear(torch.empty(0, 8), w)[:0],
        lambda w: w.add_(1),
        lambda w: w.zero_(),
        lambda w: torch.mul(w, 2, out=w),
        lambda w: w.view(torch.int32),
    ],
)
def test_looking_at_what_is_there_costs_nothing(look):
    weight = torch.ones(8, 8)
    with LiveBytes() as live:
        look(weight)
    assert live.peak == 0


def test_several_outputs_and_nested_lists_are_each_counted_once():
    with LiveBytes() as live:
        values, indices = torch.ones(100).sort()  # 400, 400, 800
        assert live.now == 400 + 800
        parts = torch.split(values, 10)
        doubled = torch._foreach_mul(list(parts), 2)  # a list of ten
        assert live.now == 400 + 800 + 400
    assert live.peak == 1600 and live.allocations == 13
    assert tensor_bytes({"a": [values, parts], "b": (doubled[0], None, 3, "x")}) == 400 + 40


def test_a_tensor_from_python_numbers_is_new():
    with LiveBytes() as live:
        x = torch.tensor([1.0] * 100)
        assert live.now == 400
        del x
    assert live.now == 0


def test_a_view_keeps_the_whole_alive_and_death_is_noticed_outside_the_block():
    with LiveBytes() as live:
        row = torch.ones(1000, 10)[3]
    assert live.now == 40_000 == tensor_bytes(row)
    del row
    assert live.now == 0


def test_the_dead_leave_nothing_behind_and_addresses_may_come_back():
    with LiveBytes() as live:
        for _ in range(200):
            torch.ones(1000)
    gc.collect()
    assert (live.now, live.peak, live.allocations) == (0, 4000, 200) and not live._alive


@given(st.lists(st.tuples(st.sampled_from("ndvi"), st.integers(0, 5), st.integers(1, 50)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_sequence_agrees_with_a_ledger(acts):
    alive: list[list[torch.Tensor]] = []  # each a storage's views
    most = 0
    with LiveBytes() as live:
        for act, place, size in acts:
            if act == "n" or not alive:
                alive.append([torch.zeros(size)])
            elif act == "d":
                alive.pop(place % len(alive))
            elif act == "v":
                alive[place % len(alive)].append(alive[place % len(alive)][0][:1])
            else:
                alive[place % len(alive)][0].add_(1)
            owed = sum(views[0].untyped_storage().nbytes() for views in alive)
            most = max(most, owed)
            assert live.now == owed
    assert live.peak == most


def test_gradients_and_what_a_graph_keeps_are_counted():
    weight = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        loss = (weight.sin() * 2).sum()
        kept = live.now
        loss.backward()
    assert kept >= 4 and weight.grad is not None and live.now >= 400
    assert storages(weight.grad).keys() <= live._alive


def test_another_threads_tensors_are_not_ours():
    with LiveBytes() as live:
        thread = threading.Thread(target=lambda: torch.ones(1000).sum())
        thread.start()
        thread.join()
    assert live.allocations == 0


def test_tied_weights_and_buffers():
    a = nn.Linear(10, 10)
    b = nn.Linear(10, 10)
    b.weight = a.weight
    norm = nn.BatchNorm1d(5)
    assert weight_bytes(a, b) == 400 + 40 + 40 and weight_bytes(nn.ModuleList([a, b])) == 480
    assert weight_bytes(norm) == 4 * 20 + 8 and weight_bytes() == 0
    assert weight_bytes(a.bfloat16()) == 220


# The pair


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [SHAPE, (1, 4, 3, 6, 5)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_bits_in_every_kind_of_number(solver, shape, kind):
    noise, schedule = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind),
        make_schedule(7, shift=3.0),
    )
    pair = LatentBuffer(shape, kind)
    for _ in range(2):  # used again
        state = denoise(bent, noise, schedule, solver, buffer=pair)
        plain = denoise(bent, noise, schedule, solver)
        assert torch.equal(state.latents, plain.latents) and state.latents.dtype == kind


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float64])
def test_a_velocity_of_another_kind(solver, to):
    noise, schedule = initial_noise([0, 1], SHAPE[1:]), make_schedule(5)
    half = lambda x, s: bent(x, s).to(to)  # noqa: E731
    state = denoise(half, noise, schedule, solver, buffer=LatentBuffer(SHAPE))
    assert torch.equal(state.latents, denoise(half, noise, schedule, solver).latents)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_velocity_that_returns_what_it_was_given(solver):
    noise, schedule = initial_noise([0, 1], SHAPE[1:]), make_schedule(6)
    state = denoise(lambda x, s: x, noise, schedule, solver, buffer=LatentBuffer(SHAPE))
    assert torch.equal(state.latents, denoise(lambda x, s: x, noise, schedule, solver).latents)


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_step_of_the_loop_allocates_latents(solver):
    noise, pair, still = initial_noise([0, 1], SHAPE[1:]), LatentBuffer(SHAPE), torch.ones(SHAPE)
    sizes = []
    for steps in (3, 9):
        with LiveBytes() as live:
            denoise(lambda x, s: still, noise, make_schedule(steps), solver, buffer=pair)
        sizes.append((live.peak, live.allocations))
    assert sizes[0][0] == sizes[1][0] <= noise.nbytes + 16  # the copy that is handed back, and one sum a step
    assert sizes[1][1] - sizes[0][1] == 6


def test_addresses_stay_and_the_result_is_ones_own():
    noise, pair = initial_noise([0, 1], SHAPE[1:]), LatentBuffer(SHAPE)
    places = {pair.front.data_ptr(), pair.back.data_ptr()}
    first = denoise(bent, noise, make_schedule(3), buffer=pair)
    kept = first.latents.clone()
    denoise(bent, noise + 1, make_schedule(4), buffer=pair)
    assert {pair.front.data_ptr(), pair.back.data_ptr()} == places
    assert torch.equal(first.latents, kept) and first.latents.data_ptr() not in places
    assert torch.equal(noise, initial_noise([0, 1], SHAPE[1:]))  # and the noise was not written to


@pytest.mark.parametrize("solver", SOLVERS)
def test_stopped_in_the_pair_and_resumed_in_it_is_uninterrupted(solver):
    noise, schedule, pair = initial_noise([0, 1], SHAPE[1:]), make_schedule(8, shift=2.0), LatentBuffer(SHAPE)
    whole = denoise(bent, noise, schedule, solver)
    stopped = denoise(bent, noise, schedule, solver, lambda info: info.step < 3, buffer=pair)
    resumed = denoise(bent, stopped.latents, schedule, solver, start=3, history=stopped.history, buffer=pair)
    assert stopped.cancelled and torch.equal(resumed.latents, whole.latents)


def test_a_callback_sees_the_same_steps():
    noise, seen = initial_noise([0, 1], SHAPE[1:]), [[], []]
    for steps, buffer in zip(seen, (None, LatentBuffer(SHAPE))):
        note = lambda info, steps=steps: steps.append((info.sigma, info.latents.clone(), info.data.clone()))  # noqa: E731
        denoise(bent, noise, make_schedule(5), callback=note, buffer=buffer)
    for (s, x, data), (s_too, x_too, data_too) in zip(*seen, strict=True):
        assert s == s_too and torch.equal(x, x_too) and torch.equal(data, data_too)


@pytest.mark.parametrize("other", [torch.zeros(1, 3, 8, 8), torch.zeros(2, 3, 8, 9), torch.zeros(SHAPE).double()])
def test_latents_that_do_not_fit(other):
    pair = LatentBuffer(SHAPE)
    with pytest.raises(ValueError, match=re.escape(str(tuple(other.shape)))):
        denoise(bent, other, make_schedule(2), buffer=pair)


# Formulas


NETS = {
    "both": DiTConfig(width=64, heads=4, patch=2, joint_depth=2, parallel_depth=2, text_width=64),
    "joint": DiTConfig(width=64, heads=4, patch=2, joint_depth=3, parallel_depth=0, text_width=64),
    "parallel": DiTConfig(width=64, heads=2, patch=4, joint_depth=0, parallel_depth=2, text_width=64),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    ("side", "tokens", "batch"), [((16, 16), 24, 1), ((8, 40), 7, 3), ((8, 8), 60, 2), ((8, 16), 32, 2)]
)
@pytest.mark.parametrize(("fused", "chunk"), [(True, None), (True, 16), (False, None), (False, 16)])
def test_activations_of_other_nets(net, side, tokens, batch, fused, chunk):
    config, prompt = NETS[net], prompts(batch, tokens, 64)
    model, x = DiT(config).requires_grad_(False), torch.zeros(batch, 4, *side)
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH), LiveBytes() as live:
        model(x, torch.zeros(batch), *prompt, chunk)
    grid = side[0] // config.patch, side[1] // config.patch
    formula = activation_bytes(config, grid, tokens, batch, 4, fused, chunk)
    assert 0.97 < formula / live.peak < 1.1


@pytest.mark.parametrize("config", [VAEConfig(width=32), VAEConfig(latent_channels=16, width=64, decoder_depth=1)])
@pytest.mark.parametrize(("height", "width", "batch", "tile"), [(8, 8, 3, None), (12, 20, 1, None), (24, 40, 2, 16)])
def test_decoding_with_other_sizes(config, height, width, batch, tile):
    vae, z = VAE(config).requires_grad_(False), torch.zeros(batch, config.latent_channels, height, width)
    with LiveBytes() as live:
        vae.decode(z) if tile is None else tiled_decode(vae, z, tile, 6)
    assert 0.95 < decode_bytes(config, height, width, batch, 4, tile, 6) / live.peak < 1.1


def test_latents():
    assert latent_bytes((16, 21, 60, 104), 2, 2) == torch.zeros(2, 16, 21, 60, 104, dtype=torch.bfloat16).nbytes


# The meter


def line(meter, **changes):
    parts = {
        "encode": lambda prompts: torch.ones(len(prompts), 100),
        "velocity": lambda c: bent,
        "decode": lambda x: x.repeat(1, 1, 4, 4)[:, :3],
        "shape": SHAPE[1:],
    }
    return generate(["a", "b"], [0, 1], make_schedule(3), meter=meter, **(parts | changes))


def test_a_meter_of_bytes_says_nothing_of_time_and_the_other_way_round():
    counted, timed = line(PeakMeter()), line(Stopwatch())
    assert list(counted.peak_bytes) == ["encode", "noise", "denoise", "decode"] and counted.seconds == {}
    assert list(timed.seconds) == ["encode", "noise", "denoise", "decode"] and timed.peak_bytes == {}
    assert torch.equal(counted.latents, timed.latents)
    assert counted.images[1].tobytes() == timed.images[1].tobytes()
    assert counted.peak_bytes["encode"] >= 800 and counted.peak_bytes["decode"] >= 2 * 3 * 32 * 32 * 4


def test_a_stage_that_fails_is_counted_and_ends():
    meter = PeakMeter()
    with pytest.raises(ZeroDivisionError), meter("bad"):
        x = torch.ones(100)
        1 / 0  # noqa: B018
    torch.ones(1000)  # outside
    assert meter.peak_bytes == {"bad": x.nbytes} and meter.total == 400


def test_cuda_is_asked_for_its_own_peak_reset_for_each_stage(monkeypatch):
    calls, peaks = [], iter([150, 120, 180])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(str(device)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    meter = PeakMeter(nn.Linear(2, 2), device="cuda:1")
    for stage in ("denoise", "decode", "decode"):
        with meter(stage):
            torch.ones(1000)
    assert meter.baseline == 100 and meter.peak_bytes == {"denoise": 50, "decode": 80} and meter.total == 180
    assert calls == ["cuda:1"] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device_the_peak_is_the_tensors():
    meter = PeakMeter(device="cuda")
    for stage, count in (("large", 2**20), ("small", 2**10)):
        with meter(stage):
            torch.ones(count, device="cuda").add(1)
    assert meter.peak_bytes == {"large": 2**23, "small": 2**13}


# Sizes in words


@given(st.integers(1, 10**15))
def test_a_size_in_words_is_never_less_and_at_most_a_hundredth_more(count):
    read = parse_bytes(format_bytes(count))
    assert count <= read <= count * 1.011 + 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("1KiB", 1024), ("1 k", 1000), (" 3.5 MB ", 3_500_000), (".5G", 5 * 10**8), ("1 TiB", 2**40), ("7B", 7), (1, 1)],
)
def test_sizes_that_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "-2 GB", "0", "0.2", 0, -1, 1.5e30j, True, None, "1 PB", "1,5 GB", "2 gigabytes"]
)
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match='try "2 GB"'):
        parse_bytes(text)


# Plans


SMALL = {
    "dit": DiTConfig(width=64, heads=4, joint_depth=1, parallel_depth=1, text_width=64),
    "vae": VAEConfig(width=96, decoder_depth=1),
    "height": 160,
    "width": 128,
    "text_tokens": 9,
}


def ways(**changes):
    """Plans from a generous budget down to the least, halving what is above the weights."""
    asked = SMALL | changes
    room, plans = 10**9, []
    while True:
        try:
            plans.append(plan_memory(asked.get("weights", 0) + room, **asked))
            room = int(max(plans[-1].peak_bytes.values()) * 1.1) - 1
        except ValueError as error:
            return plans, str(error)


@pytest.mark.parametrize(
    "changes", [{}, {"batch": 5}, {"batch": 3, "fused": False}, {"guided": False}, {"weights": 10**6}]
)
def test_the_tighter_the_smaller_until_the_least(changes):
    plans, refusal = ways(**changes)
    first, last = plans[0], plans[-1]
    assert first.batched_cfg and first.attention_chunk is first.vae_batch is first.vae_tile is None
    peaks = [max(plan.peak_bytes.values()) for plan in plans]
    assert peaks == sorted(peaks, reverse=True) and len(plans) > 2
    for plan in plans:
        assert plan.weights + 1.1 * max(plan.peak_bytes.values()) <= plan.budget
        assert plan.vae_tile is None or plan.vae_tile >= 2 * plan.vae_overlap
    least = parse_bytes(refusal.split("try ")[1].split(",")[0])
    again = plan_memory(least, **SMALL | changes)
    assert max(again.peak_bytes.values()) == max(last.peak_bytes.values())
    with pytest.raises(ValueError, match="cannot hold"):
        plan_memory(int(least * 0.98), **SMALL | changes)


def test_only_what_is_needed_is_given_up():
    plans, _ = ways(guided=False)
    assert all(plan.batched_cfg for plan in plans)  # nothing to split
    assert all(plan.attention_chunk is None for plan in ways(batch=4)[0])  # fused: no scores to save
    assert any(plan.attention_chunk for plan in ways(batch=4, fused=False, height=320, width=320, guided=False)[0])


def test_the_words_tell_the_choices():
    text = "\n".join(str(plan) for plan in ways(batch=4, dit=replace(SMALL["dit"], width=128))[0])
    for words in (
        "all of 4 pictures",
        "1 of 4 pictures",
        "tiles that share",
        "two forwards",
        "instead of",
        "one forward",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("change", "near"), [({"height": 104}, "96"), ({"width": 0}, "16"), ({"width": -8}, "16"), ({"batch": 0}, "1")]
)
def test_what_cannot_be_drawn(change, near):
    with pytest.raises(ValueError, match=f"try {near}$"):
        plan_memory("1 GB", **SMALL | change)


@pytest.mark.parametrize("fused", [True, False])
def test_every_plan_is_kept_and_draws_the_same(fused):
    torch.manual_seed(0)
    net, vae = DiT(SMALL["dit"]).requires_grad_(False), VAE(SMALL["vae"]).requires_grad_(False)
    for parameter in [*net.parameters(), *vae.parameters()]:
        nn.init.normal_(parameter, std=0.02)
    weights, sides, reference = weight_bytes(net, vae), (4, 40, 32), None
    for plan in ways(batch=3, fused=fused, weights=weights)[0]:
        pair = LatentBuffer((3, *sides))
        meter = PeakMeter(net, vae, pair.front, pair.back)
        velocity = lambda c, p=plan: guided_velocity(  # noqa: E731
            lambda x, t, prompt: net(x, t, *prompt, chunk=p.attention_chunk), *c, scale=2.0, batched=p.batched_cfg
        )
        encode = lambda texts: (prompts(3, 9, 64), prompts(3, 9, 64))  # noqa: E731
        decode = partial(planned_decode, vae, plan=plan)
        parts = {"encode": encode, "velocity": velocity, "decode": decode, "shape": sides, "buffer": pair}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH):
            result = generate(["a", "b", "c"], [0, 1, 2], make_schedule(2), meter=meter, **parts)
        assert meter.total <= plan.budget
        pictures = planned_decode(vae, result.latents, plan)
        reference = (result.latents, pictures) if reference is None else reference
        assert torch.allclose(result.latents, reference[0], atol=1e-4)
        assert torch.allclose(pictures, reference[1], atol=1e-4)


def test_a_plan_decodes_in_order():
    vae = VAE(VAEConfig(width=8)).requires_grad_(False)
    z = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    plan = plan_memory("1 GB", **SMALL | {"batch": 5})
    for batch in (None, 1, 2, 5, 9):
        assert torch.allclose(planned_decode(vae, z, replace(plan, vae_batch=batch)), vae.decode(z), atol=1e-5)


# Checkpoints


@pytest.mark.parametrize("net", NETS)
def test_checkpoints_change_no_gradient_and_no_random_number(net):
    torch.manual_seed(0)
    model, prompt = DiT(NETS[net]), prompts(2, 5, 64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    x, before, grads = torch.randn(2, 4, 8, 8), torch.get_rng_state(), []
    for options in ({}, {"run_block": checkpointed}):
        model.zero_grad()
        model(x, torch.tensor([900.0, 100.0]), *prompt, **options).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert torch.equal(torch.get_rng_state(), before) and len(grads[0]) == len(grads[1])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*grads))


def test_checkpoints_run_each_block_once_more():
    model, prompt, runs = DiT(NETS["joint"]), prompts(1, 5, 64), []
    model.joint_blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    model(torch.zeros(1, 4, 8, 8), torch.zeros(1), *prompt, run_block=checkpointed).sum().backward()
    assert len(runs) == 2
    with torch.no_grad():
        model(torch.zeros(1, 4, 8, 8), torch.zeros(1), *prompt, run_block=checkpointed)
    assert len(runs) == 3
