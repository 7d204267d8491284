"""Optimizations: what is exact is equal, what is approximate is nothing at threshold 0, and no run leaves a trace in another."""

import copy
import math
from operator import call

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_engine.attention import CrossAttention
from diffusion_engine.dit import DiT, DiTConfig, flop_count, parameter_count
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import LiveBytes
from diffusion_engine.optimizations import (
    Accelerated,
    Memory,
    PromptTable,
    StepCache,
    Timing,
    Upcast,
    amdahl,
    compiled_blocks,
    hoist,
    hoist_text,
    measure,
    multiplies,
    ratio,
    roofline,
    weight_intensity,
)
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.scheduler import make_schedule
from diffusion_engine.text_conditioning import PromptEmbeds, stack_prompts

SHAPES = {"both kinds": (1, 2), "joint alone": (2, 0), "parallel alone": (0, 2), "one block": (1, 0)}
NOISE, SCHEDULE = initial_noise([0, 1], (4, 16, 8)), make_schedule(6, shift=2.0)


def make_dit(joint: int = 1, parallel: int = 2, seed: int = 0) -> DiT:
    """A small DiT without a zero in it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        dit = DiT(DiTConfig(width=32, heads=2, joint_depth=joint, parallel_depth=parallel, text_width=16))
        for weight in dit.parameters():
            torch.nn.init.normal_(weight, std=0.15)
    return dit.eval().requires_grad_(False)


def prompt(tokens: int, seed: int, batch: int = 1, hidden: int = 0) -> PromptEmbeds:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(tokens).expand(batch, tokens) < tokens - hidden
    return PromptEmbeds(
        torch.randn(batch, tokens, 16, generator=generator), mask, torch.randn(batch, 16, generator=generator)
    )


def knob_layers(dit: DiT) -> list[torch.nn.Linear]:
    """Every layer that turns the condition into knobs, by its name."""
    return [m for name, m in dit.named_modules() if name.endswith("modulation.linear") or name == "final.modulation"]


APPLE, NOTHING = prompt(5, 1), prompt(1, 2)


def walk(network, solver="euler", scale=3.0, noise=NOISE, schedule=SCHEDULE, **options):
    velocity = guided_velocity(network, APPLE, NOTHING, scale, **options)
    return denoise(velocity, noise, schedule, solver).latents


def plain(dit):
    return lambda x, t, p: dit(x, t, *p)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_the_clock_is_synchronized_around_every_run():
    log = []
    measure(lambda: log.append("run"), repeats=2, warmup=1, synchronize=lambda: log.append("sync"))
    assert log == ["sync", "run", "sync"] * 3


@pytest.mark.parametrize("numbers", [{"repeats": 0}, {"repeats": -1}, {"warmup": -1}])
def test_nothing_measured_is_refused(numbers):
    with pytest.raises(ValueError, match="try 5 and 1"):
        measure(lambda: None, **numbers)


def test_timing_tells_its_spread_in_the_right_unit():
    assert str(Timing.of([0.002, 0.001, 0.003])) == "2 ms (1 … 3)"
    assert str(Timing.of([2.0, 1.5])) == "1.75 s (1.5 … 2)"


def test_a_ratio_wants_the_same_rounds():
    with pytest.raises(ValueError):
        ratio(Timing.of([1.0, 2.0]), Timing.of([1.0]))


@given(st.floats(0, 1), st.floats(0.01, 100))
def test_amdahl_is_the_time_that_is_left(share, factor):
    assert math.isclose(amdahl(share, factor), 1 / ((1 - share) + share / factor))
    assert amdahl(share, factor) <= amdahl(share, math.inf) or factor < 1


def test_amdahl_without_a_rest_has_no_limit():
    assert amdahl(1.0, math.inf) == math.inf


@pytest.mark.parametrize(("share", "factor"), [(-0.1, 2), (1.1, 2), (float("nan"), 2), (0.5, 0), (0.5, -1)])
def test_amdahl_refuses(share, factor):
    with pytest.raises(ValueError, match="a share lies in 0…1"):
        amdahl(share, factor)


@given(st.floats(0.1, 1e4))
def test_the_roof_has_its_ridge_at_peak_over_bandwidth(intensity):
    reached = roofline(intensity, 100.0, 4.0)
    assert reached == (100.0 if intensity >= 25 else intensity * 4.0)


def test_weight_intensity_grows_with_tokens_and_is_flop_over_bytes():
    config = DiTConfig()
    values = [weight_intensity(config, (n, n), 5) for n in (1, 4, 16)]
    assert values == sorted(values)
    assert values[1] == flop_count(config, (4, 4), 5) / (4 * parameter_count(config))


# --- hoisting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("hidden", [0, 2])
def test_hoisted_velocity_is_the_velocity_at_every_level(kind, hidden):
    dit, cond = make_dit(*SHAPES[kind]), prompt(5, 3, batch=2, hidden=hidden)
    levels = make_schedule(5, shift=3.0).sigmas
    for sigma, given_ in zip(levels.tolist(), hoist(dit, (4, 2), levels, cond), strict=True):
        t = torch.full((2,), 1000 * sigma)
        assert torch.allclose(dit.velocity(NOISE, given_), dit(NOISE, t, *cond), atol=1e-5)
        assert (given_.text_mask is None) == (hidden == 0)


def test_every_modulation_is_hoisted_and_none_runs_again():
    dit, cond = make_dit(), prompt(5, 3, batch=2)
    given_ = hoist(dit, (4, 2), SCHEDULE.sigmas, cond)
    calls = []
    for module in (*knob_layers(dit), dit.time_in, dit.pooled_in, dit.text_in):
        module.register_forward_hook(lambda *_: calls.append(1))
    dit.velocity(NOISE, given_[0])
    assert not calls
    dit(NOISE, torch.full((2,), 500.0), *cond)
    assert len(calls) == len(knob_layers(dit)) + 3


def test_hoisting_makes_one_product_a_layer_whatever_the_number_of_steps():
    dit, made = make_dit(), []
    for layer in knob_layers(dit):
        layer.register_forward_hook(lambda _, inputs, out: made.append(tuple(inputs[0].shape)))
    hoist(dit, (4, 2), make_schedule(50).sigmas, prompt(5, 3, batch=2))
    assert made == [(51 * 2, 32)] * len(knob_layers(dit))


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
@pytest.mark.parametrize("options", [{}, {"batched": False}, {"interval": (0.2, 0.8)}, {"zero_above": 0.95}])
def test_a_hoisted_walk_is_the_walk(solver, options):
    dit = make_dit()
    expected = walk(plain(dit), solver, **options)
    assert torch.allclose(walk(Accelerated(dit, SCHEDULE.sigmas), solver, **options), expected, atol=1e-4)


def test_a_time_outside_the_schedule_is_refused():
    network = Accelerated(make_dit(), SCHEDULE.sigmas)
    with pytest.raises(ValueError, match=r"t = 123 is not a time of this schedule; try one of \[1000.0"):
        network(NOISE, torch.full((2,), 123.0), prompt(5, 1, batch=2))


def test_half_precision_goes_through_and_comes_back_as_fp32():
    dit = make_dit().bfloat16()
    half = PromptEmbeds(*(x.bfloat16() if x.is_floating_point() else x for x in prompt(5, 1, batch=2)))
    t = torch.full((2,), 1000 * SCHEDULE.sigmas[2].item())
    exact = Accelerated(dit)(NOISE, t, half)
    assert exact.dtype == torch.float32
    assert torch.allclose(Accelerated(dit, SCHEDULE.sigmas)(NOISE, t, half), exact, atol=0.1, rtol=0.05)


@given(st.integers(1, 6), st.integers(0, 3), st.sampled_from([None, 2]))
@settings(deadline=None, max_examples=15)
def test_hoisted_text_is_the_same_bits(tokens, seed, chunk):
    torch.manual_seed(seed)
    cross, text = CrossAttention(16, 2, text_width=8).requires_grad_(False), torch.randn(2, tokens, 8)
    mask = torch.arange(tokens).expand(2, tokens) < torch.tensor([[tokens], [1]])
    kept, calls = hoist_text(cross, text), []
    cross.kv.register_forward_hook(lambda *_: calls.append(1))
    for x in torch.randn(3, 2, 7, 16):
        assert torch.equal(kept(x, mask, chunk), cross(x, text, mask, chunk))
    assert len(calls) == 3  # the plain one's; the hoisted one made its keys before


# --- the table of prompts --------------------------------------------------------------------------------------------


def test_prompts_are_told_apart_by_their_numbers_alone():
    table, made = PromptTable(), []
    again = PromptEmbeds(*(x.clone() for x in APPLE))
    hidden = APPLE._replace(mask=torch.zeros_like(APPLE.mask))
    near = APPLE._replace(tokens=APPLE.tokens.clone().index_fill_(1, torch.tensor([4]), 0.0))
    for p in (APPLE, again, NOTHING, hidden, near, APPLE):
        table.get(p, lambda: made.append(1) or len(made))
    assert len(made) == 4
    assert [table.get(p, lambda: None) for p in (APPLE, again, NOTHING, hidden, near)] == [1, 1, 2, 3, 4]


# --- the step cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
def test_threshold_zero_is_the_same_bits(kind, solver):
    dit = make_dit(*SHAPES[kind])
    cache = StepCache(0.0)
    assert torch.equal(walk(Accelerated(dit, cache=cache), solver), walk(plain(dit), solver))
    assert cache.reused == 0 and cache.full > 0


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("forecast", [True, False])
def test_a_large_threshold_computes_each_prompt_once_and_only_first_blocks_after(kind, forecast):
    dit = make_dit(*SHAPES[kind])
    blocks = [*dit.joint_blocks, *dit.parallel_blocks]
    calls = [0] * len(blocks)

    def counting(block, *arguments):
        calls[blocks.index(block)] += 1
        return block(*arguments)

    cache = StepCache(1e9, forecast)
    walk(Accelerated(dit, cache=cache, run_block=counting))
    assert (cache.full, cache.reused) == (1, 5)
    assert calls == [6] + [1] * (len(blocks) - 1)


def test_a_single_block_leaves_nothing_to_guess():
    dit = make_dit(1, 0)
    assert torch.equal(walk(Accelerated(dit, cache=StepCache(1e9))), walk(plain(dit)))


@pytest.mark.parametrize("kind", ["both kinds", "joint alone", "parallel alone"])
def test_a_reused_forward_is_the_first_block_and_what_the_rest_did_before(kind):
    dit, cond = make_dit(*SHAPES[kind]), prompt(5, 3, batch=2, hidden=1)
    cache = StepCache(1e9, forecast=False)
    network, t = Accelerated(dit, cache=cache), torch.full((2,), 700.0)
    seen = {}

    def spy(block, *arguments):
        out = block(*arguments)
        seen[block] = out[0] if isinstance(out, tuple) else out
        return out

    blocks = [*dit.joint_blocks, *dit.parallel_blocks]
    network(NOISE, t, cond)
    dit(NOISE, t, *cond, None, spy)
    moved = seen[blocks[-1]][:, :8] - seen[blocks[0]][:, :8]
    other = NOISE.flip(0) * 0.7
    given_ = dit.conditions((4, 2), t, *cond)
    dit(other, t, *cond, None, spy)
    from diffusion_engine.dit import unpatchify

    expected = unpatchify(dit.final(seen[blocks[0]][:, :8] + moved, given_.cond[-1]), dit.config.patch, (4, 2))
    assert torch.allclose(network(other, t, cond), expected, atol=1e-5)


def test_the_forecast_is_a_straight_line_in_time():
    memory, one = Memory(), torch.ones(1, 2, 3)
    memory.keep(900.0, one, 1.0 * one)
    assert torch.equal(memory.guess(500.0, True), one)
    memory.keep(800.0, one, 3.0 * one)
    assert torch.allclose(memory.guess(750.0, True), 4.0 * one)
    assert torch.equal(memory.guess(750.0, False), 3.0 * one)
    memory.keep(700.0, one, 4.0 * one)
    assert torch.allclose(memory.guess(650.0, True), 4.5 * one) and len(memory.rest) == 2
    memory.keep(700.0, one, 6.0 * one)  # Heun asks twice at one time
    assert torch.isfinite(memory.guess(600.0, True)).all()


def test_one_restless_sample_makes_the_whole_batch_compute():
    memory, change = Memory(), torch.ones(3, 2, 4)
    memory.keep(900.0, change, change)
    assert memory.is_near(change * 1.05, 0.1)
    moved = change.clone()
    moved[1] *= 1.2
    assert not memory.is_near(moved, 0.1) and not memory.is_near(change, 0.0)
    assert not memory.is_near(change * float("nan"), 0.1)


def test_the_memory_is_bounded():
    cache = StepCache(0.0)
    walk(Accelerated(make_dit(), cache=cache), "heun", batched=False)
    assert len(cache.memories.rows) == 2  # a part for each prompt
    assert all(len(memory.rest) == 2 for _, memory in cache.memories.rows)


def test_a_forward_that_breaks_leaves_the_memory_as_it_was():
    dit, cache = make_dit(), StepCache(0.0)
    cond, t = prompt(5, 1, batch=2), torch.full((2,), 700.0)
    Accelerated(dit, cache=cache)(NOISE, t, cond)
    ((_, memory),) = cache.memories.rows
    before = memory.first, list(memory.rest)

    def breaks(block, *arguments):
        if block is dit.parallel_blocks[-1]:
            raise KeyboardInterrupt
        return block(*arguments)

    with pytest.raises(KeyboardInterrupt):
        Accelerated(dit, cache=cache, run_block=breaks)(-NOISE, t, cond)
    assert memory.first is before[0] and memory.rest == before[1]


def test_batched_and_sequential_decide_alike_when_prompts_are_alone():
    """With one sample and w = 1 there is one prompt a forward: the cache sees the same either way."""
    dit, noise = make_dit(), NOISE[:1]
    one = [walk(Accelerated(dit, cache=StepCache(0.3)), scale=1.0, noise=noise, batched=b) for b in (True, False)]
    assert torch.equal(*one)


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_a_bad_threshold(threshold):
    with pytest.raises(ValueError, match="try 0.1, or 0 for none"):
        StepCache(threshold)


# --- all together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hoisting", [False, True])
@pytest.mark.parametrize("cache", [None, 0.0])
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_the_exact_switches_compose(hoisting, cache, chunk, batched):
    dit = make_dit()
    network = Accelerated(
        dit, SCHEDULE.sigmas if hoisting else None, None if cache is None else StepCache(cache), chunk, call
    )
    assert torch.allclose(walk(network, batched=batched), walk(plain(dit)), atol=1e-4)


def test_compiled_blocks_compile_each_kind_once_and_only_when_used():
    seen = []
    run_block = compiled_blocks(lambda forward: seen.append(forward) or forward)
    assert not seen
    dit = make_dit(2, 2)
    assert torch.equal(walk(Accelerated(dit, run_block=run_block)), walk(plain(dit)))
    assert len(seen) == 2


def test_compiling_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("diffusion_engine.optimizations.shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler, none of g\+\+, clang\+\+, cl"):
        compiled_blocks()


def test_hoisting_is_paid_for_in_bytes_that_the_docstring_names():
    dit, cond, steps = make_dit(), prompt(5, 1, batch=2), 40
    with LiveBytes() as live:
        kept = hoist(dit, (4, 2), make_schedule(steps).sigmas, cond)
    knobs = 4 * (steps + 1) * 2 * sum(layer.out_features for layer in knob_layers(dit))
    assert len(kept) == steps + 1 and knobs <= live.now < 1.2 * knobs + 4096


def test_stacked_prompts_are_met_again():
    """Guidance stacks its prompts anew at each step; hoisting must not be redone for it."""
    dit = make_dit()
    network = Accelerated(dit, SCHEDULE.sigmas)
    walk(network)
    assert len(network.hoisted.rows) == 1
    both = stack_prompts([NOTHING, NOTHING, APPLE, APPLE])
    network(torch.cat([NOISE, NOISE]), torch.full((4,), 1000.0), both)
    assert len(network.hoisted.rows) == 1


# --- half precision without its instructions --------------------------------------------------------------------------


class Dtypes(TorchDispatchMode):
    """The dtypes of what every product was given."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("addmm", "mm.", "linear", "conv")):
            self.seen |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Linear(8, 8),
        torch.nn.Linear(8, 8, bias=False),
        torch.nn.Conv2d(3, 4, 3, padding=1, stride=2),
        torch.nn.Conv3d(3, 4, (1, 3, 3), groups=1),
    ],
)
def test_a_layer_is_multiplied_in_fp32_and_rounded_once(layer, dtype):
    x = (
        torch.randn(2, 8)
        if isinstance(layer, torch.nn.Linear)
        else torch.randn(2, 3, 4, 6, 6)[:, :, : 4 if layer.weight.ndim == 5 else 1]
    )
    x = x.squeeze(2) if layer.weight.ndim == 4 else x
    half = copy.deepcopy(layer).to(dtype)
    wide = copy.deepcopy(half).float()
    with torch.no_grad():
        with Upcast(), Dtypes() as seen:
            y = half(x.to(dtype))
        assert y.dtype == dtype and torch.equal(y, wide(x.to(dtype).float()).to(dtype)) and seen.seen == {torch.float32}
        assert half.weight.dtype == dtype  # the weights are as small as before
        with Dtypes() as seen:
            half(x.to(dtype))
    assert seen.seen == {dtype}  # and nothing of it is left behind


def test_a_whole_network_is_nearer_to_fp32_than_its_own_rounding():
    dit, cond = make_dit(), prompt(5, 3, batch=2)
    t, half = torch.full((2,), 500.0), copy.deepcopy(make_dit()).bfloat16()
    small = [x.bfloat16() if x.is_floating_point() else x for x in cond]
    exact = dit(NOISE, t, *cond)
    with Upcast():
        wide = half(NOISE.bfloat16(), t, *small)
    plain = half(NOISE.bfloat16(), t, *small)
    errors = [float((y.float() - exact).abs().mean()) for y in (wide, plain)]
    assert wide.dtype == torch.bfloat16 and 0 < errors[0] < 1.2 * errors[1]
    with Upcast():
        assert torch.equal(dit(NOISE, t, *cond), exact)  # fp32 passes untouched


def test_fp32_is_always_multiplied():
    assert multiplies(torch.float32) is True and all(
        isinstance(multiplies(d), bool) for d in (torch.bfloat16, torch.float16)
    )
