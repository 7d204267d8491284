"""The controlled experiments of chapter 13: every switch against none, step cache against fewer steps, guidance, roofline.

Equality or error is measured beside every time. Chapter 13 and the report read these numbers.
"""

import math
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_engine import TextToImage
from diffusion_engine.attention import attention
from diffusion_engine.dit import flop_count
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.memory_manager import LiveBytes
from diffusion_engine.optimizations import Accelerated, StepCache, Timing, compiled_blocks, ratio, weight_intensity
from diffusion_engine.optimizations import measure as take_turns
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.scheduler import SOLVER_CALLS, make_schedule
from diffusion_engine.text_conditioning import encode_prompt
from diffusion_engine.vae import psnr, tiled_decode
from recipes.bench.tools import PROMPT, STEPS, Bench, kept, shown, table
from recipes.emoji_data import load_emoji
from recipes.quality import as_tensor, chosen_records, ranking

TITLE = "Optimizations"
PROMPTS = ("red apple", "smiling cat", "火箭", "彩虹", "pizza", "panda")
CAPTIONS = 48  # for retrieval, spread over the data set
SWITCHES = {  # what is timed against the plain engine
    "prompt_cache": {},
    "latent_buffer": {"latent_buffer": True},
    "batched_cfg": {},
    "attention_chunk": {"attention_chunk": 8},
    "vae_tile": {"vae_tile": 12, "vae_overlap": 6},
    "hoist": {"hoist": True},
    "step_cache 0": {"step_cache": 0.0},
    "step_cache 0.1": {"step_cache": 0.1},
    "guidance_interval": {"guidance_interval": (0.1, 0.9)},
}
OFF = {"prompt_cache": {"prompt_cache": False}, "batched_cfg": {"batched_cfg": False}}  # these are on by default
GUIDANCE = {
    "w = 3": {},
    "w = 1": {"guidance_scale": 1.0},
    "w = 3 on 0.1–1": {"guidance_interval": (0.1, 1.0)},
    "w = 3 on 0.3–1": {"guidance_interval": (0.3, 1.0)},
    "w = 3 on 0–0.8": {"guidance_interval": (0.0, 0.8)},
    "CFG-Zero*": {"cfg_zero_star": True, "zero_steps": 1},
    "rescale 0.7": {"guidance_rescale": 0.7},
}


def measure(bench: Bench) -> dict:
    """Everything of this section."""
    caches = step_caches(bench)
    return {
        "stages": stages(bench),
        "switches": switches(bench),
        "prompt_cache": prompt_cache(bench),
        "memory": memory(bench),
        "solvers": solvers(bench),
        **caches,
        "guidance": guidance(bench),
        "compile": compilation(bench),
        "dtypes": dtypes(bench),
        "roofline": roofline_points(bench),
    }


def draw(bench: Bench, **settings) -> Tensor:
    """The latents of one picture."""
    return bench.engine(PROMPT, num_inference_steps=STEPS, **settings).latents


def stages(bench: Bench) -> dict[str, float]:
    """Median seconds of each stage of a picture."""
    bench.now("stages")
    told = [bench.engine(PROMPT, num_inference_steps=STEPS, prompt_cache=False).seconds for _ in range(6)][1:]
    return {stage: float(f"{statistics.median(t[stage] for t in told):.4g}") for stage in told[0]}


def switches(bench: Bench) -> dict[str, dict]:
    """Time with a switch over time without it, in one round-robin, and the largest difference of the latents."""
    bench.now("switches")
    off = {name: OFF.get(name, {}) for name in SWITCHES}
    ways = list({str(s): s for s in ({}, *SWITCHES.values(), *OFF.values())}.values())  # each way once
    timings = dict(zip(map(str, ways), take_turns(*(lambda s=s: draw(bench, **s) for s in ways), repeats=5, warmup=1)))
    latents = {str(s): draw(bench, **s) for s in ways}
    return {
        name: {
            "time_ratio": kept(ratio(timings[str(on)], timings[str(off[name])]), 3),
            "max_abs_difference": float(f"{(latents[str(on)] - latents[str(off[name])]).abs().max():.1e}"),
        }
        for name, on in SWITCHES.items()
    }


def prompt_cache(bench: Bench) -> dict:
    """Encoding a prompt against taking it from the cache."""
    bench.engine.encode([PROMPT])
    model = bench.model
    miss, hit = take_turns(
        lambda: encode_prompt(model.text_encoder, model.tokenizer, PROMPT),
        lambda: bench.engine.prompt_cache.get(PROMPT, lambda: None),
        repeats=31,
    )
    return {"encode_s": kept(miss), "hit_s": kept(hit), "times_faster": kept(ratio(miss, hit), 3)}


def memory(bench: Bench) -> dict:
    """Peaks of made bytes, and the times that go with them: guidance, attention, tiles."""
    bench.now("memory")
    embeds, vae = bench.embeds(1), bench.model.vae
    call = lambda x, t, prompt: bench.model.dit(x, t, *prompt)  # noqa: E731
    noise = initial_noise([0], bench.shape)
    both = [guided_velocity(call, embeds, embeds, bench.guidance, batched=batched) for batched in (True, False)]
    heads = {n: torch.randn(3, 1, 8, n, 32).unbind() for n in (512, 1024, 2048)}
    naive = lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v  # noqa: E731
    ways = {"naive": naive, "chunks of 64": lambda *qkv: attention(*qkv, chunk=64), "fused": attention}
    wall = draw(bench).repeat(1, 1, 6, 6)
    tiles = lambda: tiled_decode(vae, wall, tile=36, overlap=6)  # noqa: E731
    with torch.inference_mode():
        timings = take_turns(tiles, lambda: vae.decode(wall), repeats=5, warmup=1)
        decibels = float(psnr(tiles(), vae.decode(wall).clamp(-1, 1)))
    return {
        "batched_over_sequential_cfg": round(peak(lambda: both[0](noise, 0.5)) / peak(lambda: both[1](noise, 0.5)), 3),
        "attention": {
            name: {str(n): peak(lambda w=way, qkv=qkv: w(*qkv)) for n, qkv in heads.items()}
            for name, way in ways.items()
        },
        "tiles": {
            "latents": list(wall.shape[-2:]),
            "peak_ratio": round(peak(tiles) / peak(lambda: vae.decode(wall)), 3),
            "time_ratio": kept(ratio(*timings), 3),
            "psnr": round(decibels, 1),
        },
    }


def peak(run: Callable[[], object]) -> int:
    """The most bytes that a run had made at once."""
    with torch.inference_mode(), LiveBytes() as live:
        run()
    return live.peak


# --- error against work ----------------------------------------------------------------------------------------------


def solvers(bench: Bench) -> list[dict]:
    """PSNR of the pictures against the exact flow (Heun, 100 steps), by solver, shift and number of model calls."""
    bench.now("solvers")
    engine, noise = bench.engine, initial_noise(range(len(PROMPTS)), bench.shape)
    velocity = engine.velocity(engine.encode(PROMPTS), engine.encode([""] * len(PROMPTS)), bench.guidance)

    def pictures(steps: int, solver: str, shift: float = 1.0) -> Tensor:
        with torch.inference_mode():
            latents = denoise(velocity, noise, make_schedule(steps, shift=shift), solver).latents
            return engine.vae.decode(latents).clamp(-1, 1)

    exact, rows = pictures(100, "heun"), []
    for solver, calls in SOLVER_CALLS.items():
        for steps in (4, 6, 8, 10, 14, 20, 28):
            for shift in (1.0, 3.0) if solver == "euler" else (1.0,):
                if steps % calls == 0:
                    found = psnr(pictures(steps // calls, solver, shift), exact).median()
                    row = {"solver": solver, "shift": shift, "calls": steps, "psnr": round(float(found), 2)}
                    rows.append(row)
    return rows


def step_caches(bench: Bench) -> dict:
    """PSNR against the 28-step picture and speed-up, for the step cache and for fewer steps; medians over the prompts.

    Each prompt is drawn alone; what is compared takes turns, prompt by prompt.
    """
    bench.now("step cache")
    ways = [("fewer", steps) for steps in (7, 9, 11, 14, 18, 22)]
    ways += [(forecast, threshold) for forecast in (True, False) for threshold in (0.06, 0.1, 0.16, 0.25)]
    told: dict[tuple, list[tuple[float, float]]] = {way: [] for way in ways}
    for seed, prompt in enumerate(PROMPTS):
        runs = [partial_walk(bench, prompt, seed, *way) for way in (("fewer", STEPS), *ways)]
        with torch.inference_mode():
            reference, *pictures = (bench.model.vae.decode(run()).clamp(-1, 1) for run in runs)  # and warm-up
        first, *rest = take_turns(*runs, repeats=3, warmup=0)
        for way, timing, picture in zip(ways, rest, pictures):
            told[way].append((ratio(first, timing).median, float(psnr(picture, reference))))
    rows = {way: [round(statistics.median(column), 2) for column in zip(*pairs)] for way, pairs in told.items()}
    fewer = [{"steps": s, "speedup": a, "psnr": b} for (kind, s), (a, b) in rows.items() if kind == "fewer"]
    caches = [
        {"forecast": kind, "threshold": t, "speedup": a, "psnr": b, "fewer_steps_psnr": at_equal_time(fewer, a)}
        for (kind, t), (a, b) in rows.items()
        if kind != "fewer"
    ]
    return {"fewer_steps": fewer, "step_cache": caches, "step_cache_title": verdict(caches)}


def partial_walk(bench: Bench, prompt: str, seed: int, kind: str | bool, value: float) -> Callable[[], Tensor]:
    """A run from noise to latents with hoisting: by ``value`` steps, or by 28 with a cache of that threshold."""
    engine, noise = bench.engine, initial_noise([seed], bench.shape)
    schedule = make_schedule(int(value) if kind == "fewer" else STEPS)
    embeds = engine.encode([prompt]), engine.encode([""])

    def run() -> Tensor:
        cache = None if kind == "fewer" else StepCache(value, forecast=bool(kind))
        network = Accelerated(engine.dit, schedule.sigmas, cache)
        return denoise(guided_velocity(network, *embeds, bench.guidance), noise, schedule).latents

    return run


def at_equal_time(fewer: list[dict], speedup: float) -> float | None:
    """PSNR that fewer steps would have at the same speed-up, on the line between neighbours; None outside of them."""
    rows = sorted(fewer, key=lambda row: row["speedup"])
    for a, b in zip(rows, rows[1:]):
        if a["speedup"] <= speedup <= b["speedup"]:
            share = (speedup - a["speedup"]) / max(b["speedup"] - a["speedup"], 1e-9)
            return round(a["psnr"] + share * (b["psnr"] - a["psnr"]), 2)
    return None


def verdict(caches: list[dict]) -> str:
    """The message of the figure, from the numbers."""
    wins = [c for c in caches if c["fewer_steps_psnr"] is not None and c["psnr"] > c["fewer_steps_psnr"] + 0.5]
    if not wins:
        return "The step cache does not beat fewer steps here"
    return f"The step cache beats fewer steps up to {max(c['speedup'] for c in wins):.1f}×, and only with the forecast"


def guidance(bench: Bench) -> list[dict]:
    """Retrieval as in `recipes.quality`, on some captions, against the samples that the network sees for a picture."""
    bench.now("guidance: the data set's latents")
    data = load_emoji()
    with torch.inference_mode():
        bank = torch.cat([bench.model.vae.encode(part) for part in as_tensor(data.images).split(96)])
    wanted = chosen_records(data.records, CAPTIONS)
    distinct = torch.tensor([index for index, record in enumerate(data.records) if record.same_as == index])
    truth, rows = torch.tensor([record.same_as for record in wanted]), []
    noise = initial_noise([0], bench.shape).repeat(CAPTIONS, 1, 1, 1)
    for name, options in GUIDANCE.items():
        bench.now(f"guidance: {name}")
        prompts = [record.label_en for record in wanted]
        latents = bench.engine(prompts, num_inference_steps=STEPS, latents=noise, **options).latents
        distances, places = ranking(latents, bank[distinct], top=1)
        right = distinct[places[:, 0]] == truth
        rows.append(
            {
                "name": name,
                "calls": samples_of(options),
                "right": round(float(right.float().mean()), 4),
                "of": CAPTIONS,
                "median_distance": round(float(distances.median()), 3),
            }
        )
    return rows


def samples_of(options: dict) -> int:
    """Samples that the network sees for one picture."""
    sigmas = make_schedule(STEPS).sigmas[:-1].tolist()[options.get("zero_steps", 0) :]
    low, high = options.get("guidance_interval", (-1.0, 1.0))
    guided = options.get("guidance_scale", 3.0) != 1
    return sum(2 if guided and low < sigma <= high else 1 for sigma in sigmas)


# --- the machine -----------------------------------------------------------------------------------------------------


def compilation(bench: Bench) -> dict:
    """The blocks compiled: warm-up apart, then in turn with the plain ones."""
    bench.now("torch.compile")
    embeds, noise = bench.embeds(1), initial_noise([0], bench.shape)
    steps = []
    for run_block in (compiled_blocks(), None):
        network = Accelerated(bench.model.dit, **({"run_block": run_block} if run_block else {}))
        velocity = guided_velocity(network, embeds, embeds, bench.guidance)
        steps.append(torch.no_grad()(lambda v=velocity: v(noise, 0.5)))
    (warmup,) = take_turns(steps[0], repeats=1, warmup=0)
    difference = float((steps[0]() - steps[1]()).abs().max())
    timings = take_turns(*steps, repeats=15)
    return {
        "warmup_seconds": round(warmup.median, 1),
        "ratio": kept(ratio(*timings), 3),
        "max_abs_difference": float(f"{difference:.1e}"),
        "steps_until_it_pays": pays_after(warmup.median, *timings),
    }


def pays_after(warmup: float, fast: Timing, slow: Timing) -> int | None:
    """Steps after which the warm-up is earned back; None where it never is."""
    return math.ceil(warmup / (slow.median - fast.median)) if slow.median > fast.median else None


def dtypes(bench: Bench) -> dict:
    """Two steps in bf16 against fp32, emulated where the machine has no bf16 instructions, and multiplied in fp32."""
    bench.now("bf16")
    half = TextToImage.from_pretrained(device="cpu", dtype="bfloat16")
    run = lambda engine, **switches: engine(PROMPT, num_inference_steps=2, **switches)  # noqa: E731
    ways = (lambda: run(half), lambda: run(half, upcast=True), lambda: run(bench.engine))
    plain, upcast, full = take_turns(*ways, repeats=5, warmup=1)
    off = [float(f"{(way().latents - ways[2]().latents).abs().max():.1e}") for way in ways[:2]]
    return {
        "bf16_over_fp32": kept(ratio(plain, full), 3),
        "upcast_over_fp32": kept(ratio(upcast, full), 3),
        **dict(zip(("max_abs_difference", "upcast_max_abs_difference"), off)),
    }


def roofline_points(bench: Bench) -> dict:
    """FLOP/s of the DiT's forward at several token counts, and of decoding one token, over FLOP for each byte of weights."""
    bench.now("roofline")
    return {
        "peak_gflops": bench.machine["fp32_gflops"],
        "bandwidth_gbs": bench.machine["bandwidth_gbs"],
        "ridge": round(bench.rate / bench.limits["bandwidth"], 1),
        "points": [*dit_points(bench), decode_point(1), decode_point(16)],
    }


def dit_points(bench: Bench) -> Iterator[dict]:
    """One picture of 1, 16, 64, 256 and 1,024 tokens."""
    dit, embeds = bench.model.dit, bench.embeds(1)
    m = embeds.tokens.shape[1]
    for side in (1, 4, 8, 16, 32):
        latents, grid = torch.randn(1, bench.shape[0], 4 * side, 4 * side), (side, side)
        run = torch.inference_mode()(lambda x=latents: dit(x, torch.tensor([500.0]), *embeds))
        (timing,) = take_turns(run, repeats=7)
        yield {
            "name": f"DiT, {side * side} tokens",
            "kind": "DiT",
            "intensity": round(weight_intensity(dit.config, grid, m), 2),
            "gflops": round(flop_count(dit.config, grid, m) / timing.median / 1e9, 2),
            "seconds": kept(timing),
        }


def decode_point(batch: int, width: int = 1536, layers: int = 2) -> dict:
    """One step of an autoregressive decoder's linear layers: 12 · width² weights a layer, one token for each sequence."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    weights = [torch.randn(*shape) for shape in shapes]

    def run() -> None:
        for weight in weights:
            F.linear(torch.ones(batch, weight.shape[1]), weight)

    (timing,) = take_turns(torch.inference_mode()(run), repeats=7)
    numbers = sum(weight.numel() for weight in weights)
    return {
        "name": f"decode, batch {batch}",
        "kind": "decode",
        "intensity": 2 * batch / 4,
        "gflops": round(2 * batch * numbers / timing.median / 1e9, 2),
        "seconds": kept(timing),
    }


# --- words -----------------------------------------------------------------------------------------------------------


def markdown(found: dict) -> list[str]:
    """The section's lines."""
    cache, memory_, compiled = found["prompt_cache"], found["memory"], found["compile"]
    lines = [
        "Every switch against the engine without it, whole pictures of 28 steps:",
        "",
        *table(
            ["switch", "time, on / off", "largest difference of the latents"],
            [
                [f"`{n}`", shown(r["time_ratio"]), f"{r['max_abs_difference']:.0e}"]
                for n, r in found["switches"].items()
            ],
        ),
        f"Prompt cache: a hit is {cache['times_faster'][0]:.0f}× faster than encoding. Batched guidance makes "
        f"{memory_['batched_over_sequential_cfg']:.2f}× the bytes of sequential guidance.",
        "",
        *table(
            ["peak of attention, 8 heads", *(f"{n} tokens" for n in memory_["attention"]["fused"])],
            [[name, *(f"{b / 1e6:.1f} MB" for b in row.values())] for name, row in memory_["attention"].items()],
        ),
        "Nine tiles of {}×{} latents: peak {:.2f}, time {}, {:.0f} dB.".format(
            *memory_["tiles"]["latents"],
            memory_["tiles"]["peak_ratio"],
            shown(memory_["tiles"]["time_ratio"]),
            memory_["tiles"]["psnr"],
        ),
        "",
    ]
    calls = sorted({row["calls"] for row in found["solvers"]})
    kinds = list(dict.fromkeys((row["solver"], row["shift"]) for row in found["solvers"]))
    quality = {(row["solver"], row["shift"], row["calls"]): row["psnr"] for row in found["solvers"]}
    lines += table(
        ["PSNR to the exact flow, dB", *(f"{c} calls" for c in calls)],
        [[f"{s}, shift {k:g}", *(f"{quality.get((s, k, c), math.nan):.1f}" for c in calls)] for s, k in kinds],
    )
    lines += [f"{found['step_cache_title']}. PSNR is against the picture of 28 steps.", ""]
    lines += table(
        ["step cache", "speed-up", "PSNR, dB", "fewer steps at equal time, dB"],
        [
            [
                f"{'forecast' if r['forecast'] else 'repeat'}, threshold {r['threshold']:g}",
                f"{r['speedup']:.2f}×",
                f"{r['psnr']:.1f}",
                "–" if r["fewer_steps_psnr"] is None else f"{r['fewer_steps_psnr']:.1f}",
            ]
            for r in found["step_cache"]
        ],
    )
    lines += table(
        ["steps instead of 28", "speed-up", "PSNR, dB"],
        [[r["steps"], f"{r['speedup']:.2f}×", f"{r['psnr']:.1f}"] for r in found["fewer_steps"]],
    )
    lines += table(
        ["guidance", "network samples", f"right, of {found['guidance'][0]['of']}", "median distance"],
        [[r["name"], r["calls"], f"{r['right']:.1%}", f"{r['median_distance']:.2f}"] for r in found["guidance"]],
    )
    pays = compiled["steps_until_it_pays"]
    lines += [
        f"`torch.compile` on the blocks: {shown(compiled['ratio'])} of the time once warm, warm-up "
        f"{compiled['warmup_seconds']:.0f} s, earned back after {f'{pays:,} steps' if pays else 'no number of steps'}; "
        f"largest difference {compiled['max_abs_difference']:.0e}. bf16 over fp32: "
        f"{shown(found['dtypes']['bf16_over_fp32'])} (above 1 where the machine has no bf16 instructions), with `upcast` "
        f"{shown(found['dtypes']['upcast_over_fp32'])}.",
        "",
    ]
    return lines + table(
        [f"roofline, ridge at {found['roofline']['ridge']:g} FLOP a byte", "FLOP a byte of weights", "GFLOP/s"],
        [[p["name"], f"{p['intensity']:g}", f"{p['gflops']:.1f}"] for p in found["roofline"]["points"]],
    )
