"""The real families against diffusers: the same random weights at a reduced width, one velocity, time and peak bytes.

Ours is measured as chapter 24 runs it with ``--hoist``: what looks at no latent is made once for all steps, and its time is
divided by their number. Where the difference comes from is told by kind of operator.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusion_engine import reference
from diffusion_engine.optimizations import Timing, ratio
from diffusion_engine.optimizations import measure as take_turns
from diffusion_engine.reference.tiny import draw_weights
from recipes.bench.blocks import peak
from recipes.bench.tools import STEPS, Bench, goal, kept, products, seconds_by_kind, shown, table

TITLE = "The real families"
GOALS = {"time, anywhere": 1.0, "time, median": 0.9}
HEADS = {
    "float32": (8, 64),
    "bfloat16": (2, 32),
}  # heads and their width: where bf16 is emulated, only little ends in time
DEPTH = {"float32": 4, "bfloat16": 1}
SIDE = {"float32": 32, "bfloat16": 8}  # of a grid of latent tokens; clips have four times as few, in four frames
TEXT, TEXT_WIDTH = 32, 128
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the largest difference, over the output's standard deviation


class Case(NamedTuple):
    """One family: diffusers' class, its configuration's entries, and a call in diffusers' arguments.

    Args:
        sizes: (heads, head width, depth) → entries of the configuration.
        call: side of the token grid → arguments.
    """

    kind: str
    sizes: Callable[[int, int, int], dict]
    call: Callable[[int], dict]


def draw(*shape: int) -> Tensor:
    """Seeded by its shape, so that both models and every run read the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def usual(heads: int, head: int, depth: int, **more) -> dict:
    """What most configurations call these sizes."""
    return {"num_attention_heads": heads, "attention_head_dim": head, "num_layers": depth} | more


def words(**more) -> dict:
    """Text and time, as most of them are called."""
    return {"encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH), "timestep": torch.tensor([500.0])} | more


def sd3_sizes(heads: int, head: int, depth: int) -> dict:
    """SD3.5's, with QK-norm."""
    return usual(heads, head, depth, sample_size=64, joint_attention_dim=TEXT_WIDTH, qk_norm="rms_norm") | {
        "caption_projection_dim": heads * head,
        "pooled_projection_dim": 64,
        "in_channels": 16,
        "out_channels": 16,
    }


def flux_sizes(heads: int, head: int, depth: int) -> dict:
    """Half of the blocks double, half single."""
    axes = [head // 8, 7 * head // 16, 7 * head // 16]
    return usual(heads, head, max(1, depth // 2), num_single_layers=max(1, depth // 2), axes_dims_rope=axes) | {
        "joint_attention_dim": TEXT_WIDTH,
        "pooled_projection_dim": 64,
        "guidance_embeds": True,
    }


def flux_call(side: int) -> dict:
    """Packed latents with their places."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack([torch.zeros(side, side), rows, columns], dim=-1).reshape(-1, 3)
    call = words(hidden_states=draw(1, side * side, 64), pooled_projections=draw(1, 64), timestep=torch.tensor([0.5]))
    return call | {
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": torch.tensor([4.0]),
    }  # times 1,000 a bf16 number


def cogvideox_sizes(heads: int, head: int, depth: int) -> dict:
    """The 2B model's, without rotations."""
    more = {"time_embed_dim": 64, "text_embed_dim": TEXT_WIDTH, "max_text_seq_length": TEXT, "sample_frames": 13}
    side = next(
        side for kind, side in SIDE.items() if HEADS[kind] == (heads, head)
    )  # its table of places has this size
    return usual(heads, head, depth, sample_width=side, sample_height=side, **more)


CASES = {
    "sd3": Case(
        "SD3Transformer2DModel",
        sd3_sizes,
        lambda side: words(hidden_states=draw(1, 16, 2 * side, 2 * side), pooled_projections=draw(1, 64)),
    ),
    "flux": Case("FluxTransformer2DModel", flux_sizes, flux_call),
    "sana": Case(
        "SanaTransformer2DModel",
        lambda heads, head, depth: (
            usual(2 * heads, head // 2, depth, num_cross_attention_heads=heads, cross_attention_head_dim=head)
            | {"cross_attention_dim": heads * head, "caption_channels": TEXT_WIDTH, "sample_size": 32}
        ),
        lambda side: words(hidden_states=draw(1, 32, side, side)),
    ),
    "wan": Case(
        "WanTransformer3DModel",
        partial(usual, text_dim=TEXT_WIDTH, ffn_dim=1024),
        lambda side: words(hidden_states=draw(1, 16, 4, side, side)),
    ),
    "ltx": Case(
        "LTXVideoTransformer3DModel",
        lambda heads, head, depth: usual(
            heads, head, depth, cross_attention_dim=heads * head, caption_channels=TEXT_WIDTH
        ),
        lambda side: (
            words(hidden_states=draw(1, side * side, 128), encoder_attention_mask=torch.ones(1, TEXT))
            | {"num_frames": 4, "height": side // 2, "width": side // 2, "rope_interpolation_scale": (8 / 25, 32, 32)}
        ),
    ),
    "cogvideox": Case(
        "CogVideoXTransformer3DModel",
        cogvideox_sizes,
        lambda side: words(hidden_states=draw(1, 4, 16, side, side), timestep=torch.tensor([500])),
    ),
    "hunyuan_video": Case(
        "HunyuanVideoTransformer3DModel",
        lambda heads, head, depth: (
            usual(heads, head, max(1, depth // 2), num_single_layers=max(1, depth // 2), text_embed_dim=TEXT_WIDTH)
            | {"pooled_projection_dim": 64, "rope_axes_dim": (head // 8, 7 * head // 16, 7 * head // 16)}
            | {"num_refiner_layers": 1}
        ),
        lambda side: (
            words(hidden_states=draw(1, 16, 4, side, side), pooled_projections=draw(1, 64))
            | {"encoder_attention_mask": torch.ones(1, TEXT), "guidance": torch.tensor([6000.0])}
        ),
    ),
}


def measure(bench: Bench) -> dict:
    """Everything of this section."""
    return {"rows": [row(bench, name, dtype) for dtype in HEADS for name in CASES]}


def both(name: str, dtype: str) -> tuple[nn.Module, nn.Module]:
    """Ours, read from the files that diffusers writes, and diffusers' own, on the same random weights."""
    import diffusers

    case, kind = CASES[name], getattr(torch, dtype)
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        theirs = getattr(diffusers, case.kind)(**case.sizes(*HEADS[dtype], DEPTH[dtype]))
        draw_weights(theirs)
        theirs.save_pretrained(Path(folder) / "transformer")
        ours = reference.drop_in(folder, dtype=kind)
        theirs = getattr(diffusers, case.kind).from_pretrained(f"{folder}/transformer", torch_dtype=kind)
    return ours, theirs.eval().requires_grad_(False)


def arguments(name: str, dtype: str) -> dict:
    """The call, activations in ``dtype``."""
    call, floats = CASES[name].call(SIDE[dtype]), ("hidden_states", "encoder_hidden_states", "pooled_projections")
    return {key: value.to(getattr(torch, dtype)) if key in floats else value for key, value in call.items()}


def own_arguments(name: str, dtype: str) -> tuple[Tensor, list[Tensor | None], dict]:
    """The same call in our arguments: latents, [text, text_mask, pooled], and what else the family takes."""
    call = arguments(name, dtype)
    x, mask = call["hidden_states"], call.get("encoder_attention_mask")
    if name in ("flux", "ltx"):  # packed: tokens (1, N, C), back to the grid that they came from
        side = round(x.shape[1] ** 0.5)
        x = x.mT.unflatten(2, (side, side) if name == "flux" else (4, side // 2, side // 2))
        x = F.pixel_shuffle(x, 2) if name == "flux" else x
    x = x.transpose(1, 2) if name == "cogvideox" else x  # frames before channels, there
    more = {"guidance": call["guidance"] / (1000 if name == "hunyuan_video" else 1)} if "guidance" in call else {}
    prompt = [call["encoder_hidden_states"], None if mask is None else mask.bool(), call.get("pooled_projections")]
    return x, prompt, more


def hoisted(model: nn.Module, name: str, dtype: str) -> tuple[Callable[[], Tensor], Callable[[], list]]:
    """One velocity of ours with everything made ahead, and the making for all steps; equal to the plain forward first."""
    latents, prompt, more = own_arguments(name, dtype)
    times = torch.linspace(1000, 1000 / STEPS, STEPS)
    make = torch.inference_mode()(lambda: model.hoist(latents.shape[1:], times, *prompt, **more))
    given = make()[STEPS // 2]
    run = torch.inference_mode()(lambda: model.velocity(latents, given))
    plain = model(latents, times[STEPS // 2 : STEPS // 2 + 1], *prompt, **more)
    difference = float((run().float() - plain.float()).abs().max() / plain.float().std())
    if difference > TOLERANCE[dtype]:
        raise AssertionError(f"{name}, made ahead, differs from its own forward by {difference:.1e}")
    return run, make


def attribution(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], rounds: int = 3) -> dict[str, float]:
    """Kind of operator → what ours takes less in it, as a share of diffusers' whole time; profiled in turn, medians."""
    seen = [(seconds_by_kind(ours, 3), seconds_by_kind(theirs, 3)) for _ in range(rounds)]
    whole = median(sum(theirs.values()) for _, theirs in seen)
    saved = {kind: median(theirs[kind] - ours[kind] for ours, theirs in seen) / whole for kind in seen[0][0]}
    return {kind: round(share, 4) for kind, share in saved.items()}


class Traffic(TorchDispatchMode):
    """Counts operations that make a tensor, and the bytes they write; views make none."""

    def __init__(self):
        super().__init__()
        self.operations, self.written = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        made = [x for x in made if func._schema.is_mutable or x.untyped_storage().data_ptr() not in given]
        self.operations += bool(made)
        self.written += sum(x.nbytes for x in made)
        return result


def traffic(run: Callable[[], object]) -> Traffic:
    """The operations and bytes of a run."""
    with Traffic() as counted:
        run()
    return counted


def row(bench: Bench, name: str, dtype: str) -> dict:
    """One family in one dtype: equal first, then timed in turn, then counted."""
    bench.now(f"{name}, {dtype}")
    models, call = both(name, dtype), arguments(name, dtype)
    plain, theirs = (torch.inference_mode()(lambda m=model: m(**call, return_dict=False)[0]) for model in models)
    results = [run().float() for run in (plain, theirs)]
    difference = float((results[0] - results[1]).abs().max() / results[1].std())
    if difference > TOLERANCE[dtype]:
        raise AssertionError(f"{name} differs from diffusers by {difference:.1e}: these are different networks")
    run, make = hoisted(models[0].model, name, dtype)
    (making,) = take_turns(make, repeats=3, warmup=1)
    mine, other, least = take_turns(run, theirs, products(plain), repeats=15 if dtype == "float32" else 9)
    mine = Timing.of([seconds + making.median / STEPS for seconds in mine.every])
    peaks, counts = [peak(each) for each in (run, theirs)], [traffic(each) for each in (run, theirs)]
    return {
        "family": name,
        "dtype": dtype,
        "weights": sum(weight.numel() for weight in models[1].parameters()),
        "ours_s": kept(mine),
        "diffusers_s": kept(other),
        "time_ratio": kept(ratio(mine, other)),
        "ahead_over_step": float(f"{making.median / STEPS / mine.median:.2g}"),
        "products_over_diffusers": kept(ratio(least, other)),
        **dict(zip(("ours_peak_bytes", "diffusers_peak_bytes"), peaks)),
        "peak_ratio": round(peaks[0] / peaks[1], 3),
        "operations": [each.operations for each in counts],
        "written_ratio": round(counts[0].written / counts[1].written, 3),
        "difference": float(f"{difference:.1e}"),
        "saved": attribution(run, theirs),
    }


def markdown(found: dict) -> list[str]:
    """The section's lines."""
    rows = found["rows"]
    head = ["family", "dtype", "weights", "ours", "diffusers", "time", "products alone", "operations", "bytes written"]
    head += ["peak bytes", "difference"]
    lines = [
        "One velocity of each family at a reduced width, on random weights that diffusers wrote and ours read; times and bytes are "
        "ours / diffusers. The products alone are our linear layers and torch's fused attention back to back, over diffusers' whole "
        "time: nothing that calls the same kernels gets below that. Operations make a "
        "tensor (views make none); the bytes that they write are counted, and so is the most held at once. The difference is the "
        "largest, over the output's standard deviation.",
        "",
        *table(
            head,
            [
                [
                    r["family"],
                    r["dtype"],
                    f"{r['weights'] / 1e6:.2f} M",
                    shown(r["ours_s"], "s"),
                    shown(r["diffusers_s"], "s"),
                    shown(r["time_ratio"]),
                    f"{r['products_over_diffusers'][0]:.2f}",
                    "{} / {}".format(*r["operations"]),
                    f"{r['written_ratio']:.2f}",
                    f"{r['peak_ratio']:.2f}",
                    f"{r['difference']:.0e}",
                ]
                for r in rows
            ],
        ),
    ]
    for dtype in HEADS:
        times = {r["family"]: r["time_ratio"][0] for r in rows if r["dtype"] == dtype}
        least = median(r["products_over_diffusers"][0] for r in rows if r["dtype"] == dtype)
        slowest, middle = max(times, key=times.get), median(times.values())
        lines += [
            goal(
                times[slowest] <= GOALS["time, anywhere"], f"{dtype}: slowest {slowest}, {times[slowest]:.2f}, goal 1."
            ),
            goal(
                middle <= GOALS["time, median"],
                f"{dtype}: median {middle:.2f}, goal {GOALS['time, median']:g}; "
                f"the products alone take {least:.2f} of diffusers' time.",
            ),
        ]
    kinds = list(rows[0]["saved"])
    lines += [
        "",
        f"Ours makes ahead, once for {STEPS} steps, what looks at no latent; the making is in the time, a {STEPS}th of it a step. "
        "Where the difference comes from: what ours takes less, by kind of operator, in per cent of diffusers' time (profiled apart "
        "from the times above, so sums differ by the noise). Activations: GELU and SiLU in place. Norms: RMSNorm by the length, knobs "
        "made ahead. Element by element and moving data: knobs and gates in one pass, turns as complex products, fewer layouts.",
        "",
        *table(
            ["saved, % of diffusers' time", "dtype", *kinds],
            [[r["family"], r["dtype"], *(f"{100 * r['saved'][kind]:.1f}" for kind in kinds)] for r in rows],
        ),
    ]
    return lines
