"""Chapter 11 harder: the loss against closed forms, runs cut at every step, damaged files, and the recipe end to end."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, nn

from diffusion_engine import training
from diffusion_engine.text_conditioning import PromptEmbeds
from diffusion_engine.training import (
    EMA,
    TrainState,
    drop_condition,
    flow_matching_loss,
    learning_rate,
    load_checkpoint,
    sample_sigmas,
    save_checkpoint,
    step_generator,
    train,
    train_step,
)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def new_state(seed: int = 0, **adamw) -> TrainState:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 4))  # with an integer buffer
    return TrainState(model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2} | adamw), EMA(model, 0.9), seed)


def loss_of(state: TrainState):
    def loss(generator: Generator):
        x = torch.randn(16, 4, generator=generator)
        return (state.model(x) - x.flip(1)).square().mean()

    return loss


def everything(state: TrainState) -> list[torch.Tensor]:
    moments = [v for s in state.optimizer.state.values() for v in s.values()]
    return [*state.model.state_dict().values(), *state.ema.shadow.values(), *moments]


def equal(a: TrainState, b: TrainState) -> bool:
    same = all(torch.equal(x, y) for x, y in zip(everything(a), everything(b), strict=True))
    return same and (a.step, a.loss, a.ema.updates) == (b.step, b.loss, b.ema.updates)


# --- noise levels ---------------------------------------------------------------------------------------------------------


@given(mean=st.floats(-3, 3), std=st.floats(0.1, 3), shift=st.floats(0.2, 8))
@settings(max_examples=25, deadline=None)
def test_a_shift_is_a_step_on_the_logit_axis(mean, std, shift):
    moved = sample_sigmas(200, seeded(), mean, std, shift)
    added = sample_sigmas(200, seeded(), mean + math.log(shift), std)
    assert torch.allclose(moved, added, atol=1e-5)
    assert (moved > 0).all() and (moved <= 1).all() and moved.dtype == torch.float32


def test_quantiles_of_the_logit_normal():
    sigmas = sample_sigmas(100_000, seeded(), 0.4, 1.3)
    normal = torch.distributions.Normal(0.4, 1.3)
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert abs(sigmas.quantile(q) - normal.icdf(torch.tensor(q)).sigmoid()) < 0.01


@pytest.mark.parametrize("kwargs, word", [({"batch": 0}, "batch 0"), ({"batch": 4, "std": 0.0}, "std 0.0"),
                                          ({"batch": 4, "std": math.nan}, "std nan")])  # fmt: skip
def test_bad_sigmas(kwargs, word):
    with pytest.raises(ValueError, match=word):
        sample_sigmas(generator=seeded(), **kwargs)


# --- the loss -------------------------------------------------------------------------------------------------------------


def point_model(value: float):
    """The exact velocity when all data is one point: (x − c) / σ."""
    return lambda x, t, _: (x - value) / (t / 1000).reshape(-1, *[1] * (x.ndim - 1))


@pytest.mark.parametrize("shape", [(64, 4, 8, 8), (64, 3, 5, 4, 6), (64, 2)], ids=["images", "clips", "points"])
def test_exact_model_has_no_loss(shape):
    assert flow_matching_loss(point_model(0.7), torch.full(shape, 0.7), None, seeded()) < 1e-5


@pytest.mark.parametrize(
    "mistake",
    ["interpolate", "target", "time", "sigma"],
    ids=["noise and data swapped", "sign of the target", "t not times 1000", "one σ for the batch"],
)
def test_typical_mistakes_are_caught_by_the_exact_model(monkeypatch, mistake):
    """Each keeps every shape; the chapter's check (loss 0 for the exact model, σ that differ) sees it."""
    right_interpolate, right_target, right_sigmas = (
        training.interpolate,
        training.velocity_target,
        training.sample_sigmas,
    )
    model, seen = point_model(0.7), []
    if mistake == "interpolate":
        monkeypatch.setattr(training, "interpolate", lambda data, noise, sigma: right_interpolate(noise, data, sigma))
    elif mistake == "target":
        monkeypatch.setattr(training, "velocity_target", lambda data, noise: right_target(noise, data))
    elif mistake == "time":
        model = lambda x, t, c: point_model(0.7)(x, t / 1000, c)  # noqa: E731
    else:
        monkeypatch.setattr(training, "sample_sigmas", lambda *args: right_sigmas(*args)[:1].expand(args[0]))
    loss = flow_matching_loss(
        lambda x, t, c: seen.append(t) or model(x, t, c), torch.full((64, 4), 0.7), None, seeded()
    )
    assert loss > 0.1 or len(seen[0].unique()) == 1


def test_loss_reads_the_dtype_of_the_data_and_reduces_in_fp32():
    dtypes = []
    data = torch.zeros(8, 4, 4, 4, dtype=torch.bfloat16)
    loss = flow_matching_loss(lambda x, t, _: dtypes.append((x.dtype, t.dtype)) or x, data, None, seeded())
    assert loss.dtype == torch.float32 and dtypes == [(torch.bfloat16, torch.float32)]


# --- condition dropout ----------------------------------------------------------------------------------------------------


def prompts(rows: int, length: int, value: float) -> PromptEmbeds:
    return PromptEmbeds(torch.full((rows, length, 3), value), torch.ones(rows, length, dtype=torch.bool), torch.full((rows, 3), value))  # fmt: skip


@given(length=st.integers(1, 6), empty_length=st.integers(1, 6), probability=st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_rows_are_dropped_whole(length, empty_length, probability):
    out = drop_condition(prompts(50, length, 1.0), prompts(1, empty_length, -1.0), probability, seeded())
    gone = out.pooled[:, 0] < 0
    assert out.tokens.shape == (50, max(length, empty_length), 3) and out.mask.dtype == torch.bool
    assert torch.equal(out.mask.sum(1), torch.where(gone, empty_length, length))
    assert (out.tokens[out.mask] == torch.where(gone, -1.0, 1.0)[:, None, None].expand_as(out.tokens)[out.mask]).all()
    assert (out.tokens[~out.mask] == 0).all()


def test_the_inputs_of_dropout_stay_as_they_were():
    given_, empty = prompts(4, 3, 1.0), prompts(1, 2, -1.0)
    drop_condition(given_, empty, 1.0, seeded())
    assert (given_.tokens == 1).all() and (empty.tokens == -1).all()


@pytest.mark.parametrize("probability, rows, word", [(1.5, 1, "1.5"), (-0.1, 1, "-0.1"), (math.nan, 1, "nan"), (0.1, 2, "2 rows")])  # fmt: skip
def test_bad_dropout(probability, rows, word):
    with pytest.raises(ValueError, match=word):
        drop_condition(prompts(4, 3, 1.0), prompts(rows, 1, 0.0), probability, seeded())


# --- EMA ------------------------------------------------------------------------------------------------------------------


@given(
    decay=st.floats(0, 0.999),
    warmup=st.sampled_from([0.0, 1.0, 10.0]),
    values=st.lists(st.floats(-5, 5), min_size=1, max_size=30),
)
@settings(max_examples=40, deadline=None)  # fmt: skip
def test_ema_is_its_recurrence_in_double_precision(decay, warmup, values):
    layer = nn.Linear(1, 1, bias=False).double().requires_grad_(False)
    layer.weight.fill_(3.0)
    ema, expected = EMA(layer, decay, warmup), 3.0
    for n, value in enumerate(values, 1):
        layer.weight.fill_(value)
        ema.update(layer)
        d = min(decay, n / (n + warmup))
        expected = d * expected + (1 - d) * value
    assert math.isclose(ema.shadow["weight"].item(), expected, rel_tol=1e-9, abs_tol=1e-9)


def test_ema_copies_integers_and_owns_its_memory():
    state = new_state()
    for _ in range(3):
        train_step(state, loss_of(state))
    assert state.ema.shadow["1.num_batches_tracked"] == 3
    before = state.ema.shadow["0.weight"].clone()
    with torch.no_grad():
        state.model[0].weight.add_(1)
    assert torch.equal(state.ema.shadow["0.weight"], before)
    copied = state.ema.copy_to(new_state().model)
    assert torch.equal(copied[0].weight, before)


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan])
def test_bad_decay(decay):
    with pytest.raises(ValueError, match="decay"):
        EMA(nn.Linear(1, 1), decay)


# --- learning rate --------------------------------------------------------------------------------------------------------


@given(steps=st.integers(1, 300), data=st.data())
@settings(max_examples=60, deadline=None)
def test_learning_rate_rises_stays_and_falls(steps, data):
    warmup = data.draw(st.integers(0, steps))
    decay = data.draw(st.one_of(st.none(), st.integers(0, steps - warmup)))
    for cosine in (False, True):
        curve = [learning_rate(i, steps, warmup, decay, cosine) for i in range(steps)]
        assert all(0 < value <= 1 for value in curve)
        top = max(range(steps), key=curve.__getitem__)
        assert curve[: top + 1] == sorted(curve[: top + 1]) and curve[top:] == sorted(curve[top:], reverse=True)
        flat = steps - warmup - (steps - warmup if decay is None else decay)
        assert curve.count(1.0) >= flat


@pytest.mark.parametrize("args", [(10, 10), (-1, 10), (0, 10, 6, 5), (0, 10, -1), (0, 10, 0, -1), (0, 10, 11)])
def test_bad_learning_rate(args):
    with pytest.raises(ValueError):
        learning_rate(*args)


# --- steps ----------------------------------------------------------------------------------------------------------------


def test_generators_of_steps_and_seeds_all_differ():
    first = {torch.rand((), generator=step_generator(seed, step)).item() for seed in range(8) for step in range(200)}
    assert len(first) > 1590  # 1,600 numbers of 24 bits: a few may meet by chance
    assert torch.equal(torch.rand(9, generator=step_generator(3, 7)), torch.rand(9, generator=step_generator(3, 7)))


def test_cpu_generators_read_32_bits_of_a_seed():
    """Why `step_generator` mixes; should PyTorch change this, the mixing may go."""
    assert torch.equal(torch.rand(4, generator=seeded(1)), torch.rand(4, generator=seeded(1 + 2**32)))


def test_training_leaves_the_global_generator_alone():
    state = new_state()
    before = torch.get_rng_state()
    train(state, loss_of(state), 5, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bad_loss_moves_nothing():
    state = new_state()
    train_step(state, loss_of(state))
    before = [tensor.clone() for tensor in everything(state)]
    for bad in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="step 1"):
            train_step(state, lambda generator, bad=bad: next(state.model.parameters()).sum() * 0 + bad)
    steep = lambda generator: (next(state.model.parameters()).sum() * 0).sqrt()  # noqa: E731, 0, with slope 0/0
    with pytest.raises(FloatingPointError, match="the gradient's norm is nan at step 1"):
        train_step(state, steep)
    assert state.step == 1 and all(torch.equal(a, b) for a, b in zip(before, everything(state)))


def test_gradients_are_clipped_group_by_group():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in zip(model, (1.0, 0.5))]
    state = TrainState(model, torch.optim.SGD(groups), EMA(model))
    before = [part.weight.detach().clone() for part in model]
    train_step(state, lambda g: 1e3 * model[0].weight.sum() + 1e-3 * model[1].weight.sum(), factor=0.1, clip=1.0)
    assert math.isclose((model[0].weight - before[0]).norm().item(), 1.0 * 0.1, rel_tol=1e-3)  # clipped to 1
    assert math.isclose((model[1].weight - before[1]).norm().item(), 4e-3 * 0.5 * 0.1, rel_tol=1e-2)  # left alone
    assert [group["initial_lr"] for group in state.optimizer.param_groups] == [1.0, 0.5]


# --- checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 3, 6, 11])
def test_a_run_cut_anywhere_ends_in_the_same_bits(tmp_path, cut):
    rate = lambda step: learning_rate(step, 12, 3, 4, cosine=True)  # noqa: E731
    whole = new_state(seed=5)
    train(whole, loss_of(whole), 12, rate, progress=False)
    state = new_state(seed=5)
    train(state, loss_of(state), 12, rate, checkpoint=tmp_path / "x.pt", stop=lambda: state.step == cut, progress=False)
    again = load_checkpoint(tmp_path / "x.pt", new_state(seed=5, lr=99.0))  # the file knows the peak rate
    assert again.step == cut
    train(again, loss_of(again), 12, rate, checkpoint=tmp_path / "x.pt", progress=False)
    assert equal(whole, again)
    train(again, loss_of(again), 12, rate, progress=False)  # already done: nothing happens
    assert again.step == 12


def test_another_seed_is_another_run():
    a, b = new_state(0), new_state(1)
    for state in (a, b):
        train(state, loss_of(state), 3, progress=False)
    assert not equal(a, b)


def test_the_curve_is_in_the_checkpoint_and_beside_it(tmp_path):
    state = new_state()
    path = tmp_path / "deep" / "x.pt"
    train(state, loss_of(state), 10, checkpoint=path, every=4, log_every=2, measure=lambda s: {"score": s.step / 2}, progress=False)  # fmt: skip
    lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10] and lines == load_checkpoint(path, new_state()).curve
    assert [line.get("score") for line in lines] == [None, 2.0, None, 4.0, 5.0]
    assert all(line["seconds"] >= 0 and math.isfinite(line["loss"]) for line in lines)
    assert sorted(p.name for p in path.parent.iterdir()) == ["x.jsonl", "x.pt"]  # no temporary file is left


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    state, path = new_state(), tmp_path / "x.pt"
    save_checkpoint(path, state)
    old = path.read_bytes()
    train_step(state, loss_of(state))
    monkeypatch.setattr(training.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(path, state)
    assert path.read_bytes() == old and sorted(p.name for p in tmp_path.iterdir()) == ["x.jsonl", "x.pt"]


@pytest.mark.parametrize("damage", [b"", b"no zip", "half", "other"])
def test_damaged_checkpoints(tmp_path, damage):
    path = tmp_path / "x.pt"
    save_checkpoint(path, new_state())
    if damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "other":
        torch.save([1, 2], path)
    else:
        path.write_bytes(damage)
    state = new_state()
    before = [tensor.clone() for tensor in everything(state)]
    with pytest.raises(ValueError, match="x.pt is no whole checkpoint"):
        load_checkpoint(path, state)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(state)))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    save_checkpoint(path, new_state(seed=1))
    with pytest.raises(ValueError, match="seed 1, not 0"):
        load_checkpoint(path, new_state(seed=0))
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="another"):
        load_checkpoint(path, TrainState(other, torch.optim.AdamW(other.parameters()), EMA(other), 1))
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt", new_state())


def test_a_checkpoint_of_another_optimizer_changes_nothing(tmp_path):
    path = tmp_path / "x.pt"
    save_checkpoint(path, new_state())
    state = new_state()
    half = list(state.model.parameters())
    state.optimizer = torch.optim.AdamW([{"params": half[:2]}, {"params": half[2:]}])
    before = [tensor.clone() for tensor in state.model.state_dict().values()]
    with pytest.raises(ValueError, match="its optimizer differs"):
        load_checkpoint(path, state)
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.state_dict().values()))


@pytest.mark.parametrize("name", ["every", "log_every"])
def test_a_pace_below_one_is_refused(name):
    state = new_state()
    with pytest.raises(ValueError, match=f"{name} 0 is below 1; try 1"):
        train(state, loss_of(state), 4, progress=False, **{name: 0})


def test_a_model_that_only_broadcasts_is_refused():
    prompts, data = (
        PromptEmbeds(torch.zeros(2, 1, 4), torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 4)),
        torch.zeros(2, 4),
    )
    with pytest.raises(ValueError, match="expected the data's shape"):
        flow_matching_loss(lambda x, t, prompts: x[:1], data, prompts, seeded())


@pytest.mark.parametrize("forgotten", ["optimizer", "ema", "step"])
def test_forgetting_one_part_of_the_state_shows(tmp_path, forgotten):
    """Typical mistakes of resumable training: each keeps all shapes and trains on happily."""
    whole, half = new_state(), new_state()
    train(whole, loss_of(whole), 12, progress=False)
    train(half, loss_of(half), 6, progress=False)
    naive = new_state()
    naive.model.load_state_dict(half.model.state_dict())
    naive.loss = half.loss
    if forgotten != "optimizer":
        naive.optimizer.load_state_dict(half.optimizer.state_dict())
    if forgotten != "ema":
        naive.ema.shadow, naive.ema.updates = half.ema.shadow, half.ema.updates
    naive.step = 0 if forgotten == "step" else 6
    train(naive, loss_of(naive), 12 - 6 * (forgotten == "step"), progress=False)
    assert not equal(whole, naive)


# --- the recipe -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(monkeypatch):
    """The recipe on 24 pictures and with parts so small that every stage takes a second."""
    pytest.importorskip("diffusion_engine.guidance")
    from diffusion_engine.dit import DiT, DiTConfig
    from diffusion_engine.text_conditioning import TextEncoder, TextEncoderConfig
    from diffusion_engine.vae import VAE, VAEConfig
    from recipes import train as module

    torch.set_num_threads(1)
    pictures, records = module.emoji()
    monkeypatch.setattr(module, "emoji", lambda: (pictures[:24], records[:24]))
    monkeypatch.setattr(module, "VAE", lambda: VAE(VAEConfig(width=8, encoder_depth=1, decoder_depth=1)))
    monkeypatch.setattr(module, "DiT", lambda: DiT(DiTConfig(width=32, heads=2, joint_depth=1, parallel_depth=1, text_width=16)))  # fmt: skip
    small = lambda t: TextEncoder(TextEncoderConfig(t.vocab_size, 16, 2, 1, t.max_length))  # noqa: E731
    monkeypatch.setattr(module, "new_text_encoder", small)
    return module


def options_for(recipe, folder, **changes):
    return recipe.Options(**{"folder": folder, "steps": 6, "batch": 4, "every": 3, "progress": False} | changes)


def test_all_stages_resume_bit_identically_and_export(recipe, tmp_path):
    from diffusion_engine.model_folder import load_model

    whole, cut = options_for(recipe, tmp_path / "whole"), options_for(recipe, tmp_path / "cut")
    for name, run in recipe.RUN.items():
        run(whole)
        stops = iter([False, False, False, True])  # Ctrl-C during step 4
        with pytest.MonkeyPatch.context() as patch:
            from contextlib import nullcontext

            patch.setattr(recipe, "stop_on_signal", lambda stops=stops: nullcontext(lambda: next(stops)))
            with pytest.raises(recipe.typer.Exit) as left:
                run(cut)
        assert left.value.exit_code == 130
        run(cut)
        a, b = (torch.load(o.checkpoint(name), weights_only=True) for o in (whole, cut))
        assert a["step"] == b["step"] == 6 and a["loss"] == b["loss"]
        assert all(torch.equal(a["ema"]["shadow"][key], b["ema"]["shadow"][key]) for key in a["ema"]["shadow"])
        assert all(torch.equal(value, b["model"][key]) for key, value in a["model"].items())
        assert [e["step"] for e in b["curve"]] == [3, 4, 6]
    recipe.export_model(cut, tmp_path / "model", {"guidance_scale": 3.0, "num_inference_steps": 5, "shift": 1.0})
    model = load_model(tmp_path / "model")
    assert all(value.dtype == torch.float32 for value in model.dit.state_dict().values())
    spread = model.vae.encode(recipe.emoji()[0]).std(dim=(0, 2, 3))
    assert torch.allclose(spread, torch.ones(4), atol=0.01)  # the exported VAE is calibrated
    log = json.loads((tmp_path / "model" / "training.json").read_text())
    assert [part["name"] for part in log["parts"]] == list(recipe.STAGES)
    assert all(part["parameters"] > 0 and part["curve"][-1][0] == 6 for part in log["parts"])


def test_warm_start_begins_with_the_shipped_weights(recipe, tmp_path, monkeypatch):
    first = options_for(recipe, tmp_path / "first", steps=1)
    for run in recipe.RUN.values():
        run(first)
    recipe.export_model(first, tmp_path / "model", {})
    monkeypatch.setattr(recipe, "SHIPPED_MODEL", tmp_path / "model")
    warm = options_for(recipe, tmp_path / "warm", steps=1, from_assets=True)
    for name, run in recipe.RUN.items():
        seen = {}
        monkeypatch.setattr(recipe, "run", lambda stage, state, *args, seen=seen, **kw: seen.update(state.ema.shadow))
        run(warm)
        shipped = recipe.shipped(name)
        prefix = "encoder." if name == "text" else ""
        close = {key: torch.equal(seen[prefix + key], value) for key, value in shipped.items()}
        assert all(close.values()) and close
    with pytest.raises(recipe.typer.BadParameter, match="from-assets"):
        recipe.trained("dit", recipe.DiT(), options_for(recipe, tmp_path / "nowhere"))


def test_muon_makes_updates_orthogonal():
    from recipes.train import Muon, orthogonalise

    torch.manual_seed(0)
    for shape in [(3, 16, 48), (3, 48, 16), (1, 16, 16)]:
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.3 and values.max() < 1.3
    ours = [nn.Parameter(torch.randn(16, 48)), nn.Parameter(torch.randn(48, 16)), nn.Parameter(torch.randn(16, 48))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, lr=0.02, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="original")
    for _ in range(5):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        assert torch.allclose(p, q, atol=0.02)  # PyTorch's own orthogonalises in bf16
