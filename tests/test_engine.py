"""TextToImage on a tiny model with random weights: what it promises holds whatever the weights are."""

import copy
import itertools
import json
import operator
import re
import threading
import warnings

import PIL.ImageChops
import pytest
import torch

from diffusion_engine import EngineWarning, NotFiniteError, TextToImage, files
from diffusion_engine.memory_manager import parse_bytes, weight_bytes
from diffusion_engine.model_folder import load_model
from diffusion_engine.optimizations import Accelerated, StepCache
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.request import Switches, make_request
from diffusion_engine.scheduler import SOLVERS, make_schedule

STEPS = 4


def draw(engine, *args, **settings):
    return engine(*args, **({"num_inference_steps": STEPS} | settings))


# Batches and seeds


def test_each_picture_of_a_batch_is_the_one_drawn_alone(engine):
    prompts = ["red apple", "rocket in the night sky", "猫"]
    batch = draw(engine, prompts, num_images_per_prompt=2, seed=7, negative_prompt=["", "blue", ""])
    assert batch.seeds == (7, 8, 9, 10, 11, 12) and len(batch.images) == 6
    for i in range(6):
        negative = "blue" if i // 2 == 1 else None
        alone = draw(engine, prompts[i // 2], seed=7 + i, negative_prompt=negative)
        assert (batch.latents[i] - alone.latents[0]).abs().max() < 1e-4


def test_the_first_noise_is_bit_identical(engine):
    """A schedule's first latents are the noise; x at σ = 1 is seen through the velocity callable."""
    seen = {}

    def spy(x, t, *rest):
        if float(t[0]) == 1000:
            seen.setdefault(len(x), x[-1].clone())
        return engine.dit(x, t, *rest)

    twin = copy.copy(engine)
    twin.dit = spy
    draw(twin, ["red apple", "rocket"], seed=3, guidance_scale=1)
    draw(twin, "rocket", seed=4, guidance_scale=1)
    assert torch.equal(seen[1], seen[2]) and torch.equal(seen[1], initial_noise([4], seen[1].shape)[0])


def test_the_same_call_twice_is_bit_identical_and_leaves_the_global_generator_alone(engine):
    before = torch.get_rng_state()
    first, second = draw(engine, "red apple"), draw(engine, "red apple")
    assert torch.equal(first.latents, second.latents) and first.images[0].tobytes() == second.images[0].tobytes()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first.latents, draw(engine, "red apple", seed=1).latents)
    assert not torch.equal(first.latents, draw(engine, "火箭").latents)


def test_given_latents_replace_the_seeds(engine):
    noise = initial_noise([0], engine.latent_shape(64, 64))
    assert torch.equal(draw(engine, "red apple", latents=noise).latents, draw(engine, "red apple").latents)
    assert torch.equal(
        draw(engine, "red apple", latents=noise.double(), seed=9).latents, draw(engine, "red apple").latents
    )


@pytest.mark.parametrize("latents", [torch.zeros(4, 16, 16), torch.zeros(2, 4, 16, 16), torch.zeros(1, 4, 16, 20)])
def test_latents_of_another_shape(engine, latents):
    with pytest.raises(ValueError, match=r"expected \(1, 4, 16, 16\)"):
        draw(engine, "red apple", latents=latents)


@pytest.mark.parametrize("latents", [[[0.0]], torch.zeros(1, 4, 16, 16, dtype=torch.int64), "noise"])
def test_latents_that_are_no_float_tensor(engine, latents):
    with pytest.raises(ValueError, match="float tensor"):
        draw(engine, "red apple", latents=latents)


@pytest.mark.parametrize(("height", "width"), [(32, 128), (128, 48), (80, 64)])
def test_sizes(engine, height, width):
    result = draw(engine, "red apple", height=height, width=width)
    assert result.images[0].size == (width, height) and tuple(result.latents.shape) == (1, 4, height // 4, width // 4)


def test_bad_arguments_are_refused_before_anything_is_drawn(engine):
    for settings in (
        {"num_inference_steps": 0},
        {"guidance_scale": float("nan")},
        {"seed": 1.5},
        {"num_images_per_prompt": 0},
        {"height": 70},
        {"solver": "ddim"},
        {"negative_prompt": ["a", "b"]},
    ):
        with pytest.raises(ValueError, match=";"):
            draw(engine, "red apple", callback=pytest.fail, **settings)
    with pytest.raises(ValueError, match="no prompt"):
        engine()


# Watching, stopping, going on


def test_the_callback_sees_every_step(engine):
    seen = []
    result = draw(engine, "red apple", callback=seen.append)
    assert [info.step for info in seen] == [1, 2, 3, 4]
    assert [info.sigma for info in seen] == result.sigmas[1:].tolist()
    assert torch.equal(seen[-1].latents, result.latents) and torch.allclose(seen[-1].data, result.latents, atol=1e-5)
    assert engine.decode(seen[-1].data)[0].size == (64, 64)
    assert list(result.sigmas) == list(make_schedule(STEPS, shift=engine.shift).sigmas)


@pytest.mark.parametrize("solver", SOLVERS)
def test_stopped_and_resumed_is_uninterrupted(engine, solver):
    settings = {"solver": solver, "num_images_per_prompt": 2, "negative_prompt": "blue", "guidance_scale": 2.5}
    whole = draw(engine, "red apple", **settings)
    stopped = draw(engine, "red apple", **settings, callback=lambda info: info.step < 2)
    assert stopped.cancelled and stopped.images == [] and stopped.step == 2
    again = engine(resume=stopped, callback=lambda info: info.step < 3)
    resumed = engine(resume=again)
    assert again.step == 3 and not resumed.cancelled and resumed.step == STEPS
    assert torch.equal(resumed.latents, whole.latents)
    assert [i.tobytes() for i in resumed.images] == [i.tobytes() for i in whole.images]
    assert [i.info for i in resumed.images] == [i.info for i in whole.images]


def test_stopped_at_the_last_step_resumes_to_the_picture(engine):
    stopped = draw(engine, "red apple", callback=lambda info: info.step < STEPS)
    assert stopped.cancelled and stopped.step == STEPS
    assert engine(resume=stopped).images[0].tobytes() == draw(engine, "red apple").images[0].tobytes()


def test_resume_takes_nothing_else(engine):
    stopped = draw(engine, "red apple", callback=lambda info: False)
    for settings in ({"seed": 1}, {"num_inference_steps": 3}, {"latents": stopped.latents}, {"guidance_scale": 1.0}):
        with pytest.raises(ValueError, match="given with resume"):
            engine(resume=stopped, **settings)
    with pytest.raises(ValueError, match="prompt given with resume"):
        engine("red apple", resume=stopped)
    with pytest.raises(ValueError, match="expected the Result"):
        engine(resume="yesterday")


def test_a_run_resumes_only_where_it_began(engine, tiny_model):
    stopped = draw(engine, "red apple", callback=lambda info: False)
    other = TextToImage(load_model(tiny_model)._replace(fingerprint="0123456789abcdef"))
    with pytest.raises(ValueError, match=f"run of model {engine.fingerprint} in float32, this engine is model 0123"):
        other(resume=stopped)


def test_threads_share_one_engine(tiny_model):
    engine = TextToImage.from_pretrained(tiny_model, device="cpu")
    jobs = [
        ("red apple", 0, "euler"),
        ("火箭", 1, "multistep"),
        ("blue heart", 2, "heun"),
        ("red apple", 3, "multistep"),
    ]
    expected = [draw(engine, prompt, seed=seed, solver=solver).latents for prompt, seed, solver in jobs]
    engine.prompt_cache = type(engine.prompt_cache)()
    found, start = [None] * len(jobs), threading.Barrier(len(jobs))

    def work(i):
        prompt, seed, solver = jobs[i]
        start.wait()
        for _ in range(3):
            found[i] = draw(engine, prompt, seed=seed, solver=solver).latents

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


# Guidance and prompts


def test_guidance_one_is_the_prompt_alone_and_costs_half(engine):
    rows = []
    twin = copy.copy(engine)
    twin.dit = lambda x, *rest: rows.append(len(x)) or engine.dit(x, *rest)
    draw(twin, "red apple", guidance_scale=1)
    assert sum(rows) == STEPS
    rows.clear()
    draw(twin, "red apple", guidance_scale=4)
    assert sum(rows) == 2 * STEPS


def test_a_negative_prompt_counts_above_guidance_one_only(engine):
    for guidance, changes in ((3.0, True), (1.0, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain = draw(engine, "red apple", guidance_scale=guidance)
            negative = draw(engine, "red apple", "blue heart", guidance_scale=guidance)
        assert torch.equal(plain.latents, negative.latents) != changes
        assert bool(caught) != changes
    assert caught[0].category is EngineWarning and "does nothing" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_long_prompt_is_drawn_and_what_was_dropped_is_quoted(engine):
    words = "a red apple under a blue sky with seven small clouds and a rocket far away"
    for _ in range(2):  # also when the prompt cache knows it
        with pytest.warns(EngineWarning, match="dropped: '.*rocket far away'"):
            assert draw(engine, words).images
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(engine, "red apple", "blue")


def test_a_very_long_prompt_is_not_quoted_whole(engine):
    with pytest.warns(EngineWarning, match="dropped: .* … .*the end'") as caught:
        draw(engine, "word " * 500 + "the end")
    assert len(str(caught[0].message)) < 250


def test_an_empty_prompt_draws(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        empty = draw(engine, "")
    assert torch.allclose(empty.latents, draw(engine, "", guidance_scale=9.0).latents, atol=1e-3)  # cond = uncond


# NaN


@pytest.mark.parametrize(
    ("part", "stage"), [("text_encoder", "encode"), ("dit", "denoise, step 1 of 4"), ("vae", "decode")]
)
def test_a_nan_names_its_stage(tiny_model, part, stage):
    model = load_model(tiny_model)
    next(getattr(model, part).parameters() if part != "vae" else model.vae.decoder.parameters()).fill_(float("nan"))
    with pytest.raises(NotFiniteError, match=f"^{stage}"):
        draw(TextToImage(model), "red apple")


def test_a_nan_in_given_latents(engine):
    with pytest.raises(NotFiniteError, match="^noise"):
        draw(engine, "red apple", latents=torch.full((1, 4, 16, 16), float("nan")))


def test_a_guidance_that_overflows_names_the_step(engine):
    with pytest.raises(NotFiniteError, match="denoise, step"):
        draw(engine, "red apple", guidance_scale=1e38)


# Devices, dtypes, files


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_draws_nearly_the_same(tiny_model, engine, dtype):
    half = TextToImage.from_pretrained(tiny_model, device="cpu", dtype=dtype)
    result, full = draw(half, "red apple"), draw(engine, "red apple")
    assert result.latents.dtype == torch.float32
    assert (result.latents - full.latents).abs().mean() < 0.1 * full.latents.abs().mean()


def test_unknown_devices_and_dtypes(tiny_model):
    for settings, says in (
        ({"device": "gpu"}, "device 'gpu' is unknown"),
        ({"dtype": "fp8"}, "dtype 'fp8' is unknown"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "not available on this machine; try")]),
    ):
        with pytest.raises(ValueError, match=says):
            TextToImage.from_pretrained(tiny_model, **settings)


def test_the_record_says_everything(engine):
    result = draw(engine, ["red apple", "猫"], num_images_per_prompt=2, seed=5)
    records = [json.loads(image.info[files.RECORD]) for image in result.images]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert all(files.request_of(record) == result.request for record in records)
    assert records[0]["model"] == engine.fingerprint and records[0]["torch"] == torch.__version__
    again = engine.draw(files.request_of(records[2]))
    assert again.images[2].tobytes() == result.images[2].tobytes()


def test_seconds_of_every_stage(engine):
    assert list(draw(engine, "red apple").seconds) == ["encode", "noise", "denoise", "decode"]


def test_latents_can_be_used_further(engine):
    latents = draw(engine, "red apple").latents
    assert not latents.is_inference() and (latents.requires_grad_() * 2).sum().backward() is None


# Switches


EXACT = {
    "batched_cfg": [True, False],
    "attention_chunk": [None, 5],
    "vae_tile": [None, 12],
    "latent_buffer": [False, True],
    "hoist": [False, True],
    "step_cache": [None, 0.0],
}
SAME_BITS = ("latent_buffer", "prompt_cache", "step_cache")
APPROXIMATE = [
    {"step_cache": 0.3},
    {"guidance_interval": (0.2, 0.8)},
    {"guidance_rescale": 0.5},
    {"cfg_zero_star": True},
    {"zero_steps": 1},
]


@pytest.mark.parametrize("other", [{}, *APPROXIMATE], ids=lambda options: "-".join(options) or "plain")
def test_what_must_be_equal_is_equal_in_every_combination(engine, other):
    """All exact switches with all others; where only bit-exact ones differ, the bits are the same."""
    prompts = {"prompt": ["red apple", "猫"], "seed": 3, "num_inference_steps": 2, "solver": "multistep"}
    prompts["vae_overlap"] = 11
    known = {}
    for place, values in enumerate(itertools.product(*EXACT.values())):
        if other and place % 9:  # with another picture, a spread of the combinations
            continue
        switches = dict(zip(EXACT, values)) | {"prompt_cache": place % 3 > 0, "vae_batch": place % 5 or None} | other
        if other.get("step_cache") and not switches["batched_cfg"]:
            continue  # a reused step is an approximation, and it may be another one
        result = engine(**prompts, **switches)
        assert result.request.switches == Switches.of(switches | {"vae_overlap": 11})
        first = next(iter(known.values()), result)
        assert (result.latents - first.latents).abs().max() < 1e-4, switches
        for mine, others in zip(result.images, first.images):
            assert PIL.ImageChops.difference(mine, others).getextrema() <= ((0, 1),) * 3, switches
        key = tuple(value for name, value in switches.items() if name not in SAME_BITS)
        assert torch.equal(known.setdefault(key, result).latents, result.latents), switches
    assert len(known) > 3


@pytest.mark.parametrize("options", APPROXIMATE, ids=lambda options: "-".join(options))
def test_what_makes_another_picture_does(engine, options):
    plain = engine("red apple", num_inference_steps=8)
    assert not torch.equal(engine("red apple", num_inference_steps=8, **options).latents, plain.latents)


@pytest.mark.parametrize(
    "options", [*APPROXIMATE, {"hoist": True, "batched_cfg": False, "vae_tile": 8, "vae_overlap": 3}]
)
def test_the_record_repeats_the_switches_bit_for_bit(engine, options):
    result = draw(engine, "red apple", **options)
    record = json.loads(result.images[0].info[files.RECORD])
    assert files.request_of(record).switches == result.request.switches
    assert engine.draw(files.request_of(record)).images[0].tobytes() == result.images[0].tobytes()


def test_a_record_from_before_the_switches_is_read(engine):
    record = json.loads(draw(engine, "red apple").images[0].info[files.RECORD])
    del record["request"]["switches"]
    assert files.request_of(record).switches == Switches()


def test_switches_of_the_engine_and_of_the_call(tiny_model):
    engine = TextToImage.from_pretrained(tiny_model, device="cpu", hoist=True, step_cache=0.0)
    assert draw(engine, "red apple").request.switches.changed == {"hoist": True, "step_cache": 0.0}
    assert draw(engine, "red apple", hoist=False).request.switches.changed == {"step_cache": 0.0}


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"hoists": True}, "did you mean hoist"),
        ({"hoist": 1}, "neither True nor False"),
        ({"attention_chunk": 0}, "below 1; try 1"),
        ({"attention_chunk": 2.5}, "not a whole number; try 2"),
        ({"vae_tile": 1}, "below 2"),
        ({"vae_tile": 8}, "vae overlap 8 must be below vae tile 8; try overlap 2, or tile 9"),
        ({"vae_batch": 0}, "below 1"),
        ({"step_cache": -0.1}, "below 0; try 0"),
        ({"step_cache": float("nan")}, "not finite; try 0.1"),
        ({"guidance_interval": (0.8, 0.2)}, "is empty; try 0.2,0.9"),
        ({"guidance_interval": 0.5}, "not two numbers"),
        ({"guidance_interval": "0.2,1.5"}, "above 1; try 1"),
        ({"guidance_rescale": 2}, "above 1"),
        ({"zero_steps": 4}, "zero steps 4 of 4 leave nothing"),
    ],
)
def test_bad_switches(engine, tiny_model, switches, says):
    with pytest.raises(ValueError, match=says):
        draw(engine, "red apple", **switches)
    if "zero_steps" not in switches:
        with pytest.raises(ValueError, match=says):
            TextToImage.from_pretrained(tiny_model, **switches)


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
@pytest.mark.parametrize("options", [{"step_cache": 0.4}, {"step_cache": 0.4, "hoist": True, "latent_buffer": True}])
def test_a_resumed_run_with_a_step_cache_is_the_uninterrupted_one(engine, solver, options):
    settings = {"num_inference_steps": 12, "solver": solver, **options}
    whole = engine("red apple", **settings)
    stopped = engine("red apple", **settings, callback=lambda info: info.step < 7)
    assert torch.equal(engine(resume=stopped).latents, whole.latents)
    assert torch.equal(engine(resume=stopped).latents, whole.latents)  # resuming spends nothing


@pytest.mark.parametrize("way", ["cancelled", "interrupted"])
def test_a_step_cache_is_gone_after_an_abort(engine, way):
    settings = {"num_inference_steps": 12, "step_cache": 0.4}
    fresh = engine("red apple", **settings)

    def abort(info):
        if info.step == 5:
            if way == "cancelled":
                return False
            raise KeyboardInterrupt

    try:
        engine("red apple", **settings, seed=9, callback=abort)
    except KeyboardInterrupt:
        pass
    assert torch.equal(engine("red apple", **settings).latents, fresh.latents)
    held = [value for value in vars(engine).values() if isinstance(value, (StepCache, Accelerated))]
    assert not held


def test_two_threads_with_step_caches_do_not_meet(engine):
    settings = {"num_inference_steps": 8, "step_cache": 0.4, "hoist": True}
    alone = [engine(prompt, seed=seed, **settings).latents for seed, prompt in enumerate(("red apple", "猫"))]
    found = [None, None]

    def work(seed, prompt):
        found[seed] = engine(prompt, seed=seed, **settings).latents

    threads = [threading.Thread(target=work, args=(s, p)) for s, p in enumerate(("red apple", "猫"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, found))


def test_upcast_keeps_half_the_bytes_and_comes_nearer(tiny_model, engine):
    half = TextToImage.from_pretrained(tiny_model, dtype="bfloat16", device="cpu")
    exact = draw(engine, "red apple").latents
    first, plain = draw(half, "red apple", upcast=True), draw(half, "red apple")
    again = draw(half, "red apple", upcast=True)  # the prompt cache holds both roundings by now
    assert torch.equal(first.latents, again.latents) and first.request.switches.changed == {"upcast": True}
    off = [float((result.latents - exact).abs().mean()) for result in (first, plain)]
    assert half.dit.image_in.weight.dtype == torch.bfloat16 and off[0] < 1.5 * off[1]
    for switches in ({"hoist": True}, {"batched_cfg": False}, {"attention_chunk": 3}, {"vae_batch": 1}):
        other = draw(half, "red apple", upcast=True, **switches)
        assert (other.latents - first.latents).abs().mean() < off[1]
    with pytest.warns(EngineWarning, match="upcast does nothing in float32 on cpu"):
        assert torch.equal(draw(engine, "red apple", upcast=True).latents, exact)


def test_compiled_blocks_are_made_once_an_engine(engine, monkeypatch):
    made = []
    monkeypatch.setattr("diffusion_engine.engine.compiled_blocks", lambda: made.append(1) or operator.call)
    twin = copy.copy(engine)
    plain = draw(twin, "red apple")
    for _ in range(2):
        result = draw(twin, "red apple", compile=True)
        assert torch.equal(result.latents, plain.latents) and result.request.switches.compile
    assert made == [1]


# Memory


def test_profile_counts_bytes_and_no_time(engine):
    result, plain = draw(engine, "red apple", profile=True), draw(engine, "red apple")
    assert list(result.peak_bytes) == ["encode", "noise", "denoise", "decode"] and result.seconds == {}
    assert all(count > 0 for count in result.peak_bytes.values()) and plain.peak_bytes == {}
    assert torch.equal(result.latents, plain.latents)
    stopped = draw(engine, "red apple", callback=lambda info: info.step < 2)
    assert set(engine(resume=stopped, profile=True).peak_bytes) == set(result.peak_bytes)


def test_a_budget_chooses_what_fits_and_is_kept(shipped_model):
    engine = TextToImage.from_pretrained(device="cpu")
    settings = {"prompt": "red apple", "num_images_per_prompt": 3, "num_inference_steps": 1}
    request = make_request(engine.config, **settings)
    with pytest.raises(ValueError, match="cannot hold") as caught:
        engine(**settings, memory_budget="10 kB")
    least = re.search(r"try ([\d.]+ [kM]?B)", str(caught.value))[1]
    plain, tight = engine(**settings), engine(**settings, memory_budget=least, profile=True)
    assert tight.request == engine.within(request, engine.plan(request, least)) != request
    assert tight.request.switches.changed == {"batched_cfg": False, "vae_batch": 1}
    weights = weight_bytes(engine.dit, engine.vae, engine.text_encoder)
    assert weights + max(tight.peak_bytes.values()) <= parse_bytes(least)
    assert (tight.latents - plain.latents).abs().max() < 1e-4
    assert engine(**settings, memory_budget="2 GB").request.switches == Switches()


@pytest.mark.parametrize("size", ["2 boxes", "", 0, -5, "GB"])
def test_a_budget_that_is_no_size(engine, size):
    with pytest.raises(ValueError, match="no size in bytes"):
        draw(engine, "red apple", memory_budget=size)


def test_resume_takes_no_switches(engine):
    stopped = draw(engine, "red apple", callback=lambda info: info.step < 2)
    for options in ({"hoist": True}, {"memory_budget": "2 GB"}, {"step_cache": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} given with resume"):
            engine(resume=stopped, **options)


def test_the_shipped_model_draws(shipped_model):
    engine = TextToImage.from_pretrained(device="cpu")
    pair = engine(["red apple", "火箭"], num_inference_steps=6, seed=3)
    alone = engine("火箭", num_inference_steps=6, seed=4)
    assert pair.images[0].size == (64, 64) and (pair.latents[1] - alone.latents[0]).abs().max() < 1e-4
    stopped = engine("火箭", num_inference_steps=6, seed=4, callback=lambda info: info.step < 3)
    assert torch.equal(engine(resume=stopped).latents, alone.latents)
