"""Chapter 22 under harder conditions: padding anywhere, sizes, what is refused, the pipeline's odd arguments."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tiny import TINY, save, their_model

from diffusion_engine import reference
from diffusion_engine.reference.hunyuan_video import (
    HunyuanVideo,
    HunyuanVideoConfig,
    TokenRefiner,
    channels_last,
    trim_padding,
    video_rope,
)

torch.set_num_threads(1)
DISTILLED, PLAIN = TINY["hunyuan-video"], TINY["hunyuan-video-plain"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("hunyuan")
    return {name: save(TINY[name], home / name) for name in ("hunyuan-video", "hunyuan-video-plain")}


@pytest.fixture(scope="module")
def model(folders) -> HunyuanVideo:
    return reference.from_pretrained(folders["hunyuan-video"])


def inputs(seed: int = 0, b: int = 2, f: int = 3, h: int = 4, w: int = 6, m: int = 8) -> dict:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"latents": (b, 4, f, h, w), "text": (b, m, 32), "pooled": (b, 24)}
    drawn = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return drawn | {"t": torch.tensor([875.5, 12.25][:b]), "guidance": torch.tensor([6.0, 2.5][:b])}


# --- padding ---------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 255), min_size=2, max_size=2), st.integers(0, 9))
def test_padding_may_stand_anywhere_and_is_never_seen(masks, seed):
    """Bits of a number say which tokens are real: gaps, left, right; what hidden tokens hold changes nothing."""
    net = redrawn()
    real = torch.tensor([[bool(bits >> i & 1) for i in range(8)] for bits in masks])
    batch = inputs(seed)
    expected = net(**batch, text_mask=real)
    filled = batch | {"text": torch.where(real[..., None], batch["text"], 50.0)}
    assert torch.allclose(net(**filled, text_mask=real), expected, atol=1e-5)
    for i in range(2):
        alone = {name: value[i : i + 1] for name, value in batch.items()}
        alone["text"] = batch["text"][i : i + 1, real[i]]
        assert torch.allclose(net(**alone)[0], expected[i], atol=1e-5)


def redrawn() -> HunyuanVideo:
    """One small network for the properties, made once."""
    if not hasattr(redrawn, "net"):
        rng = torch.Generator().manual_seed(3)
        redrawn.net = HunyuanVideo(HunyuanVideoConfig(**DISTILLED.config | {"rope_axes_dim": (4, 6, 6)})).eval()
        for weight in redrawn.net.requires_grad_(False).parameters():
            fan_in = weight[0].numel() if weight.ndim > 1 else 4
            weight.copy_(torch.randn(weight.shape, generator=rng) / fan_in**0.5)
    return redrawn.net


def test_diffusers_counts_tokens_and_we_look_where_they_are(model):
    """Padding on the left: ours gives what the words alone give, diffusers hides words and hears padding."""
    theirs, batch, real = their_model(DISTILLED), inputs(b=1), torch.arange(8)[None] >= 5
    rest = {"pooled_projections": batch["pooled"], "guidance": 1000 * batch["guidance"]}
    words = theirs(batch["latents"], batch["t"], batch["text"][:, 5:], torch.ones(1, 3), **rest).sample
    padded = theirs(batch["latents"], batch["t"], batch["text"], real.long(), **rest).sample
    assert (model(**batch, text_mask=real) - words).abs().max() < 1e-5
    assert (padded - words).abs().max() > 1e-3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2**12 - 1), min_size=1, max_size=3))
def test_trimming_keeps_every_real_token_in_order(masks):
    real = torch.tensor([[bool(bits >> i & 1) for i in range(12)] for bits in masks])
    text = torch.arange(12.0).expand(len(masks), 12)[..., None]
    short, left = trim_padding(text, real)
    assert left is None or (left.any(0).all() and not left.all())
    for i in range(len(masks)):
        kept = short[i] if left is None else short[i][left[i]]
        assert torch.equal(kept, text[i][real[i]])


def test_an_empty_prompt_is_refused(model):
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1] = False
    with pytest.raises(ValueError, match="hides all 8 tokens of sample 1"):
        model(**inputs(), text_mask=real)


def test_one_prompt_runs_without_a_mask(model, monkeypatch):
    """Where nothing is hidden, attention gets no mask: that is what trimming is for."""
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        seen.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model(**inputs(b=1), text_mask=torch.arange(8)[None] < 3)
    assert len(seen) == 6 and all(mask is None for mask in seen)  # 2 of the refiner, 2 joint, 2 parallel
    seen.clear()
    model(**inputs(), text_mask=torch.arange(8) < torch.tensor([[3], [5]]))
    assert all(mask.shape[-2] == 1 for mask in seen)  # never a mask of all pairs


# --- what no latent changes ------------------------------------------------------------------------------------------

TIMES = torch.tensor([987.6, 500.0, 3.2])
MASKS = {"none": None, "all real": torch.ones(2, 8).bool(), "right": torch.arange(8) < torch.tensor([[3], [6]])}
MASKS["gaps"] = torch.tensor([[True, False] * 4, [False, False, True, True] * 2])


def asked(scale: bool, mask: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, tuple]:
    """Latents of two clips, not square, three frames; what `conditions` takes after the time."""
    batch = inputs(6)
    words = batch["text"].to(dtype), mask, batch["pooled"].to(dtype), batch["guidance"] if scale else None
    return batch["latents"].to(dtype), words


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["hunyuan-video", "hunyuan-video-plain"])
def test_hoisted_is_forward_at_every_time(name, mask, folders):
    net, (x, words) = reference.from_pretrained(folders[name]), asked(name == "hunyuan-video", MASKS[mask])
    ahead = net.hoist(x.shape[1:], TIMES, *words)
    for t, ready in zip(TIMES, ahead, strict=True):
        assert torch.allclose(net.velocity(x, ready), net(x, t.expand(2), *words), atol=1e-5)
        assert (ready.text_mask is None) == (mask in ("none", "all real"))
    assert all(ready.positions is ahead[0].positions for ready in ahead)
    plain = net.conditions(x.shape[1:], TIMES[:2], *words)
    assert torch.equal(net.velocity(x, plain), net(x, TIMES[:2], *words))
    assert all(cond is plain.cond[0] for cond in plain.cond)  # nothing is made ahead that a block makes


def test_a_step_makes_no_knob_and_refines_no_word(model):
    """One batch through the refiner and one product a layer for all times ahead, none of them in a step."""
    (x, words), rows = asked(True, MASKS["right"]), []
    every = [model.refiner, model.cond_in, model.final.modulation]
    every += [m.linear for block in model.joint_blocks for m in (block.image_modulation, block.text_modulation)]
    every += [block.modulation.linear for block in model.parallel_blocks]
    hooks = [m.register_forward_hook(lambda m, args, out: rows.append(len(out))) for m in every]
    ahead = model.hoist(x.shape[1:], TIMES, *words)
    assert rows == [6] * len(every)
    rows.clear()
    model.velocity(x, ahead[2])
    assert not rows
    for hook in hooks:
        hook.remove()


def test_half_precision_keeps_its_dtype_ahead(model, folders):
    net = reference.from_pretrained(folders["hunyuan-video"], dtype=torch.bfloat16)
    (x, words), (x32, words32) = asked(True, MASKS["right"], torch.bfloat16), asked(True, MASKS["right"])
    for t, ready in zip(TIMES, net.hoist(x.shape[1:], TIMES, *words)):
        found, truth = net.velocity(x, ready), model(x32, t.expand(2), *words32)
        assert found.dtype == ready.text.dtype == ready.cond[0][0][0].gate.dtype == torch.bfloat16
        assert (found - truth).abs().mean() < 1.2 * (net(x, t.expand(2), *words) - truth).abs().mean() + 1e-3


# --- the parts -------------------------------------------------------------------------------------------------------


def test_rows_of_the_last_layer():
    rows = torch.arange(3 * 2 * 4 * 5.0).reshape(3, 2, 4, 5)  # (c, t, h, w), one number a row
    assert torch.equal(channels_last(rows.flatten(), 3), rows.permute(1, 2, 3, 0).flatten())


def test_turns_end_where_the_text_begins():
    config = HunyuanVideoConfig()
    rope = video_rope((2, 3, 4), config, 5)
    assert rope.cos.shape == (29, 64) and not rope.halves
    slow = 23 // 12, 23 // 4 % 3, 23 % 4  # the last patch
    first = [position * torch.ones(()) for position in slow]
    for pair, angle in zip((0, 8, 36), first):  # the fastest hand of each axis turns by one a place
        assert torch.isclose(rope.cos[23, pair], angle.cos())
    assert (rope.cos[24:] == 1).all() and (rope.sin[24:] == 0).all()


@pytest.mark.parametrize("real", [None, torch.arange(6) < torch.tensor([[6], [2]])])
def test_refiner_is_theirs(real):
    theirs = their_model(DISTILLED).context_embedder
    ours = TokenRefiner(32, 64, heads=4, depth=2).requires_grad_(False)
    names = {"text_in": "proj_in", "cond_in.time_in.mlp.0": "time_text_embed.timestep_embedder.linear_1"}
    names |= {"cond_in.time_in.mlp.2": "time_text_embed.timestep_embedder.linear_2"}
    names |= {f"cond_in.pooled_in.{2 * i}": f"time_text_embed.text_embedder.linear_{i + 1}" for i in (0, 1)}
    for i in (0, 1):
        inside = {"gates": "norm_out.linear", "norm1": "norm1", "norm2": "norm2", "attn.stream.out": "attn.to_out.0"}
        inside |= {"ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"}
        names |= {f"blocks.{i}.{ours}": f"token_refiner.refiner_blocks.{i}.{name}" for ours, name in inside.items()}
    for here, there in names.items():
        ours.get_submodule(here).load_state_dict(theirs.get_submodule(there).state_dict())
    for block, other in zip(ours.blocks, theirs.token_refiner.refiner_blocks):
        for leaf in ("weight", "bias"):
            stacked = [getattr(other.attn, f"to_{a}").get_parameter(leaf) for a in "qkv"]
            block.attn.stream.qkv.get_parameter(leaf).copy_(torch.cat(stacked))
    rng = torch.Generator().manual_seed(5)
    text, t = torch.randn(2, 6, 32, generator=rng), torch.tensor([900.0, 30.0])
    expected = theirs(text, t, real)
    heard = torch.ones(2, 6, dtype=torch.bool) if real is None else real
    assert (ours(text, t, real)[heard] - expected[heard]).abs().max() < 1e-5


# --- shapes, and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 2, 2), (1, 8, 4), (5, 2, 10), (4, 6, 2)])
def test_every_size_is_theirs(size, model):
    f, h, w = size
    batch = inputs(b=1, f=f, h=h, w=w, m=3)
    latents, text, pooled = batch["latents"], batch["text"], batch["pooled"]
    theirs = their_model(DISTILLED)
    expected = theirs(latents, batch["t"], text, torch.ones(1, 3), pooled, 1000 * batch["guidance"]).sample
    assert (model(**batch) - expected).abs().max() < 1e-5


def test_patches_of_several_frames(tmp_path):
    tiny = TINY["hunyuan-video"]
    deep = type(tiny)(tiny.module, tiny.kind, tiny.config | {"patch_size_t": 2}, tiny.calls)
    model, batch = reference.from_pretrained(save(deep, tmp_path)), inputs(f=4)
    args = [batch[name] for name in ("latents", "t", "text")]
    with torch.no_grad():
        expected = their_model(deep)(*args, torch.ones(2, 8), batch["pooled"], 1000 * batch["guidance"]).sample
    assert (model(**batch) - expected).abs().max() < 1e-5
    with pytest.raises(ValueError, match="frames 3 is not a multiple of patch 2; try 2 or 4"):
        model(**inputs(f=3))


def test_sizes_that_no_patch_divides(model):
    assert model.min_multiple == 2
    with pytest.raises(ValueError, match="height 5 is not a multiple of patch 2; try 4 or 6"):
        model(**inputs(h=5))
    with pytest.raises(ValueError, match=r"sizes \(4, 6\) are not \(F, H, W\)"):
        model(**inputs() | {"latents": torch.zeros(2, 4, 4, 6)})


def test_guidance_is_wanted_or_not(model, folders):
    with pytest.raises(ValueError, match="guidance is missing"):
        model(**inputs() | {"guidance": None})
    plain = reference.from_pretrained(folders["hunyuan-video-plain"])
    with pytest.raises(ValueError, match="guidance is given"):
        plain(**inputs())
    with pytest.raises(ValueError, match="guidance is given"):
        plain.hoist((4, 3, 4, 6), TIMES, inputs()["text"], None, inputs()["pooled"], inputs()["guidance"])
    with pytest.raises(ValueError, match="guidance is missing"):
        reference.drop_in(folders["hunyuan-video"])(
            inputs()["latents"], inputs()["t"], inputs()["text"], torch.ones(2, 8), inputs()["pooled"]
        )


@pytest.mark.parametrize(
    ("entries", "needle"),
    [
        ({"image_condition_type": "token_replace"}, "image_condition_type 'token_replace' is not built here; try None"),
        (
            {"image_condition_type": "latent_concat", "in_channels": 9},
            "image_condition_type 'latent_concat' is not built here",
        ),
        ({"in_channels": 9}, "in_channels 9 is not built here; try 4"),
        ({"rope_axes_dim": [4, 6, 8]}, "rope_axes_dim"),
        ({"qk_norm": "layer_norm"}, "layer_norm"),
        ({"mlp_ratio": 3.0}, "mlp_ratio 3.0"),
        ({"num_refiner_layers": 1}, "without a place"),
        ({"guidance_embeds": False}, "guidance_embedder"),
        ({"new_trick": "on"}, "new_trick"),
    ],
)
def test_configurations_that_are_refused(entries, needle, folders, tmp_path):
    file = folders["hunyuan-video"] / "transformer" / "config.json"
    (tmp_path / "diffusion_pytorch_model.safetensors").symlink_to(file.parent / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises(ValueError, match=needle):
        reference.from_pretrained(tmp_path)


def test_image_to_video_checkpoints_are_refused_by_name(tmp_path):
    import diffusers

    kind = getattr(diffusers, DISTILLED.kind)
    for entries in ({"image_condition_type": "token_replace"}, {"image_condition_type": "latent_concat"}):
        kind(**DISTILLED.config | entries).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="image_condition_type .* is not built here; try None"):
            reference.drop_in(tmp_path)


# --- diffusers' pipeline ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
        vae = AutoencoderKLHunyuanVideo(**sizes).eval()
    absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = HunyuanVideoPipeline(
        **absent, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), transformer=None
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("name", ["hunyuan-video", "hunyuan-video-plain"])
@pytest.mark.parametrize("negative", [False, True])
def test_pipeline(name, negative, folders, pipeline):
    """Two prompts of different length; with a negative prompt diffusers asks twice; guidance is always passed."""
    batch, real = inputs(), torch.arange(8) < torch.tensor([[3], [8]])
    prompt = {"prompt_embeds": batch["text"], "pooled_prompt_embeds": batch["pooled"], "prompt_attention_mask": real}
    if negative:
        no = {"prompt_embeds": -batch["text"], "pooled_prompt_embeds": -batch["pooled"]}
        no["prompt_attention_mask"] = real.flip(0)
        prompt |= {f"negative_{key}": value for key, value in no.items()} | {"true_cfg_scale": 3.0}
    ask = prompt | {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 3, "output_type": "pt"}

    def draw(transformer, **how):
        pipeline.transformer = transformer
        return pipeline(**ask | how, generator=torch.Generator().manual_seed(1)).frames

    for how, tolerance in (({"output_type": "latent"}, 1e-4), ({}, 1 / 255)):
        expected = draw(their_model(TINY[name]), **how)
        found = draw(reference.drop_in(folders[name]), **how)
        assert found.shape == expected.shape and (found - expected).abs().max() < tolerance
