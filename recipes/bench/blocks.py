"""Ours against diffusers' blocks on the same weights: a stack of joint blocks, and one guided step of the shipped DiT."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import LiveBytes
from diffusion_engine.optimizations import Upcast, multiplies, ratio
from diffusion_engine.optimizations import measure as take_turns
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.transformer_block import JointBlock
from recipes.bench.tools import Bench, goal, kept, products, shown, table
from recipes.diffusers_blocks import Joint, assemble

TITLE = "Against diffusers"
TOKENS = (64, 256, 1024)
# dtype → width, heads, depth, tolerance. Where bf16 is emulated (about 1 GFLOP/s), only a small stack ends in time.
STACKS = {"float32": (256, 8, 4, 1e-4), "bfloat16": (64, 2, 1, 5e-2)}
TEXT, BATCH = 16, 2
GOALS = {"time, anywhere": 1.0, "time, median": 0.9, "peak bytes": 0.8}


def measure(bench: Bench) -> dict:
    """Everything of this section."""
    rows = [stack_row(bench, dtype, n) for dtype in STACKS for n in TOKENS]
    return {"stacks": rows, "guided_step": guided_step(bench)}


def stacks(dtype: str) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Ours and diffusers' joint blocks on the same random weights."""
    width, heads, depth, _ = STACKS[dtype]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ours = nn.ModuleList(JointBlock(width, heads) for _ in range(depth)).requires_grad_(False)
        for block in ours:  # a fresh gate is shut and would hide every difference
            for modulation in (block.image_modulation, block.text_modulation):
                nn.init.normal_(modulation.linear.weight, std=0.02)
        theirs = nn.ModuleList(Joint(block, width, heads) for block in ours)
    return tuple(blocks.to(getattr(torch, dtype)).eval().requires_grad_(False) for blocks in (ours, theirs))


def runner(blocks: nn.ModuleList, x: Tensor, text: Tensor, cond: Tensor) -> Callable[[], Tensor]:
    """A run through a stack; image and text tokens at its end, in one tensor."""

    @torch.inference_mode()
    def run() -> Tensor:
        image, words = x, text
        for block in blocks:
            image, words = block(image, words, cond)
        return torch.cat([image, words], dim=1)

    return run


def stack_row(bench: Bench, dtype: str, tokens: int) -> dict:
    """One stack at one number of image tokens: equal first, then timed in turn, then counted."""
    bench.now(f"joint blocks, {dtype}, {tokens} tokens")
    width, heads, depth, tolerance = STACKS[dtype]
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(getattr(torch, dtype))  # noqa: E731
    inputs = draw(BATCH, tokens, width), draw(BATCH, TEXT, width), draw(BATCH, width)
    modules = stacks(dtype)
    ours, theirs = (runner(blocks, *inputs) for blocks in modules)
    difference = float((ours().float() - theirs().float()).abs().max())
    if difference > tolerance:
        raise AssertionError(f"diffusers' blocks differ by {difference:.1e}: these are different networks")
    wide = [] if multiplies(getattr(torch, dtype)) else [widened(ours)]
    ours_s, theirs_s, least, *upcast = take_turns(
        ours, theirs, products(ours), *wide, repeats=21 if dtype == "float32" else 11
    )
    timings, peaks = (ours_s, theirs_s), [peak(run) for run in (ours, theirs)]
    return {
        "dtype": dtype,
        "tokens": tokens,
        **dict(zip(("width", "heads", "depth"), (width, heads, depth))),
        **dict(zip(("ours_s", "diffusers_s", "time_ratio"), map(kept, (*timings, ratio(*timings))))),
        "products_over_diffusers": kept(ratio(least, timings[1])),
        **dict(zip(("ours_peak_bytes", "diffusers_peak_bytes"), peaks)),
        "peak_ratio": round(peaks[0] / peaks[1], 3),
        "max_abs_difference": float(f"{difference:.1e}"),
        "upcast_ratio": kept(ratio(upcast[0], theirs_s)) if wide else None,
        "upcast_peak_ratio": round(peak(wide[0]) / peaks[1], 3) if wide else None,
    }


def widened(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The run with its halves multiplied in fp32."""

    def again() -> Tensor:
        with Upcast():
            return run()

    return again


def peak(run: Callable[[], object]) -> int:
    """The most bytes that a run had made at once."""
    with torch.inference_mode(), LiveBytes() as live:
        run()
    return live.peak


def guided_step(bench: Bench) -> dict:
    """One batched guided velocity of the shipped DiT, ours against one whose blocks are diffusers'; equal to 1e-4 first."""
    bench.now("a guided step")
    embeds, latents = bench.embeds(1), initial_noise([0], bench.shape)

    def step_of(dit: nn.Module) -> Callable[[], Tensor]:
        call = lambda x, t, cond: dit(x, t, *cond)  # noqa: E731
        velocity = guided_velocity(call, embeds, embeds, bench.guidance, batched=True)
        return torch.inference_mode()(lambda: velocity(latents, 0.5))

    ours, theirs = step_of(bench.model.dit), step_of(assemble(bench.model.dit))
    difference = float((ours() - theirs()).abs().max())
    if difference > 1e-4:
        raise AssertionError(f"diffusers' blocks differ by {difference:.1e}: these are different networks")
    timings = take_turns(ours, theirs, repeats=31)
    names = ("ours_s", "diffusers_s", "time_ratio")
    return dict(zip(names, map(kept, (*timings, ratio(*timings))))) | {"max_abs_difference": float(f"{difference:.1e}")}


def markdown(found: dict) -> list[str]:
    """The section's lines."""
    rows, step = found["stacks"], found["guided_step"]
    lines = [
        f"Joint blocks (SD3's) on the same weights, batch {BATCH}, {TEXT} text tokens; time and peak bytes are ours / "
        "diffusers. The products alone are our linear layers and torch's fused attention back to back, over diffusers' whole "
        "time: nothing that calls the same kernels gets below that.",
        "",
        *table(
            [
                "dtype, width × depth",
                "image tokens",
                "ours",
                "diffusers",
                "time",
                "products alone",
                "peak bytes",
                "with `upcast`: time",
                "peak bytes",
                "largest difference",
            ],
            [
                [
                    f"{r['dtype']}, {r['width']} × {r['depth']}",
                    r["tokens"],
                    shown(r["ours_s"], "s"),
                    shown(r["diffusers_s"], "s"),
                    shown(r["time_ratio"]),
                    f"{r['products_over_diffusers'][0]:.2f}",
                    f"{r['peak_ratio']:.2f}",
                    shown(r["upcast_ratio"]) if r["upcast_ratio"] else "–",
                    f"{r['upcast_peak_ratio']:.2f}" if r["upcast_ratio"] else "–",
                    f"{r['max_abs_difference']:.0e}",
                ]
                for r in rows
            ],
        ),
        f"A batched guided step of the shipped DiT: {shown(step['ours_s'], 's')} against {shown(step['diffusers_s'], 's')}, "
        f"ratio {shown(step['time_ratio'])}.",
        "",
    ]
    lines += [
        "Where the processor has no instructions for a type, `upcast` (kept so, multiplied in fp32) is the faster way once there "
        "is work, and `reference` takes it by itself: the goals of time read the faster of both, the goal of bytes the one without.",
        "",
    ]
    times = sorted(min((r["upcast_ratio"] or r["time_ratio"])[0], r["time_ratio"][0]) for r in rows)
    middle, memory = (times[len(times) // 2] + times[(len(times) - 1) // 2]) / 2, max(r["peak_ratio"] for r in rows)
    least = sorted(r["products_over_diffusers"][0] for r in rows)[len(rows) // 2]
    return lines + [
        goal(times[-1] <= GOALS["time, anywhere"], f"slowest ratio {times[-1]:.2f}, goal at most 1 anywhere."),
        goal(
            middle <= GOALS["time, median"],
            f"median ratio {middle:.2f}, goal {GOALS['time, median']:g}; "
            f"the products alone take {least:.2f} of diffusers' time.",
        ),
        goal(memory <= GOALS["peak bytes"], f"largest ratio of peak bytes {memory:.2f}, goal {GOALS['peak bytes']:g}."),
        goal(step["time_ratio"][0] <= 1, f"a batched guided step: {step['time_ratio'][0]:.2f}, goal 1."),
        "",
    ]
