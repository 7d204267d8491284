"""A whole picture, stage by stage, against the time that its arithmetic needs; the DiT's forward; cold processes."""

import json
import statistics
import subprocess
import sys
import tempfile

import torch

from diffusion_engine.model_folder import SHIPPED_MODEL, TOKENIZER, WEIGHTS
from diffusion_engine.optimizations import Timing, amdahl
from diffusion_engine.optimizations import measure as take_turns
from diffusion_engine.text_conditioning import encode_prompt
from recipes.bench.tools import PROMPT, STEPS, Bench, count_flops, goal, kept, products, seconds_by_kind, shown, table

TITLE = "A picture"
GOALS = {"picture_over_gemm_time": 1.5, "cold_generate_above_import_torch_s": 3.0}
BATCHES = (2, 32)
# A small process that starts another, waits, and tells its seconds and its peak memory: a child's peak counts from what its
# parent held when it was started, so this one must be small.
LAUNCHER = """
import json, resource, subprocess, sys, time
begun = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
seconds = time.perf_counter() - begun
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
sys.exit(code)
"""


def measure(bench: Bench) -> dict:
    """Everything of this section."""
    parts = (bench.model.dit, bench.model.vae, bench.model.text_encoder)
    dit = {str(batch): forward_report(bench, batch) for batch in BATCHES}
    return {
        "weights_mib": round(sum(p.numel() * p.element_size() for part in parts for p in part.parameters()) / 2**20, 1),
        "files_mib": round(model_bytes() / 2**20, 1),
        "picture": picture_report(bench, dit["2"]["gflop"] * 1e9),
        "dit": dit,
        "cold": cold_report(bench),
    }


def picture_report(bench: Bench, step_flops: float) -> dict:
    """A guided picture, as it is by default and with `hoist`, against the time that its FLOPs need at the GEMM rate."""
    bench.now("whole pictures")
    results, model = [], bench.model
    plain, hoisted = take_turns(
        lambda: results.append(bench.engine(PROMPT, num_inference_steps=STEPS)),
        lambda: bench.engine(PROMPT, num_inference_steps=STEPS, hoist=True),
        repeats=7,
        warmup=1,
    )
    stages = {stage: statistics.median(r.seconds[stage] for r in results[1:]) for stage in results[-1].seconds}
    with torch.inference_mode():
        decode = count_flops(lambda: model.vae.decode(results[-1].latents))
        encode = count_flops(lambda: encode_prompt(model.text_encoder, model.tokenizer, PROMPT))
    flops = STEPS * step_flops + decode + 2 * encode
    over = {
        name: Timing.of([s * bench.rate / flops for s in t.every]) for name, t in (("", plain), ("_hoisted", hoisted))
    }
    return {
        "seconds": kept(plain),
        "seconds_hoisted": kept(hoisted),
        "stages": {stage: float(f"{seconds:.4g}") for stage, seconds in stages.items()},
        "gflop": round(flops / 1e9, 2),
        "gemm_seconds": round(flops / bench.rate, 4),
        **{f"over_gemm_time{name}": kept(value) for name, value in over.items()},
    }


def forward_report(bench: Bench, batch: int) -> dict:
    """Time, FLOPs and share of the GEMM rate of one forward, and what eats the rest."""
    bench.now(f"DiT forward, batch {batch}")
    forward = bench.forward(batch)
    flops = count_flops(forward)
    whole, least = take_turns(forward, products(forward), repeats=15)
    spent = seconds_by_kind(forward)
    return {
        "seconds": kept(whole),
        "gflop": round(flops / 1e9, 4),
        "share_of_gemm_rate": round(flops / whole.median / bench.rate, 3),
        "share_of_gemm_rate_products_alone": round(flops / least.median / bench.rate, 3),
        "time_outside_products": round(1 - least.median / whole.median, 3),
        "shares": {kind: round(seconds / sum(spent.values()), 4) for kind, seconds in spent.items()},
    }


def cold_report(bench: Bench, repeats: int = 5) -> dict:
    """Fresh processes: ``import torch`` alone, the package, its command, and a whole ``generate``; seconds and peak memory."""
    bench.now("cold processes")
    python = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "import torch": [python, "-c", "import torch"],
            "import diffusion_engine": [python, "-c", "import diffusion_engine"],
            "from diffusion_engine import TextToImage": [python, "-c", "from diffusion_engine import TextToImage"],
            "diffusion-engine --help": [python, "-m", "diffusion_engine", "--help"],
            "diffusion-engine generate": [
                python,
                "-m",
                "diffusion_engine",
                "generate",
                PROMPT,
                "-o",
                f"{folder}/a.png",
            ],
        }
        told: dict[str, list[dict]] = {name: [] for name in commands}
        for _ in range(repeats + 1):
            for name, command in commands.items():
                done = subprocess.run([python, "-S", "-c", LAUNCHER, *command], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{name}: {done.stderr[-500:]}")
                told[name].append(json.loads(done.stdout))
    seconds = {
        name: [run["seconds"] for run in runs[1:]] for name, runs in told.items()
    }  # the first warms the disk cache
    above = [a - b for a, b in zip(seconds["diffusion-engine generate"], seconds["import torch"])]
    processes = {
        name: {"seconds": kept(Timing.of(seconds[name])), "peak_mib": round(max(r["peak_bytes"] for r in runs) / 2**20)}
        for name, runs in told.items()
    }
    return {"processes": processes, "generate_above_import_torch_s": kept(Timing.of(above))}


def model_bytes() -> int:
    """Size of the shipped model's files."""
    return sum((SHIPPED_MODEL / name).stat().st_size for name in (*WEIGHTS.values(), TOKENIZER, "config.json"))


def markdown(found: dict) -> list[str]:
    """The section's lines."""
    picture, cold = found["picture"], found["cold"]
    whole = sum(picture["stages"].values())
    lines = [
        f"A guided picture in {STEPS} steps, warm: {shown(picture['seconds'], 's')}; with `hoist` "
        f"{shown(picture['seconds_hoisted'], 's')}. Weights {found['weights_mib']:.1f} MiB in fp32, "
        f"{found['files_mib']:.1f} MiB on disk. The last column is Amdahl's limit for removing a stage altogether.",
        "",
        *table(
            ["stage", "ms", "share", "whole at best"],
            [
                [stage, f"{1e3 * s:.2f}", f"{s / whole:.1%}", f"{amdahl(s / whole, float('inf')):.2f}×"]
                for stage, s in picture["stages"].items()
            ],
        ),
    ]
    for batch, dit in found["dit"].items():
        lines += [
            f"DiT forward at batch {batch}: {shown(dit['seconds'], 's')}, {dit['gflop']:.2f} GFLOP, "
            f"{dit['share_of_gemm_rate']:.0%} of the GEMM rate; its products and attention alone, back to back: "
            f"{dit['share_of_gemm_rate_products_alone']:.0%}. Where the time goes:",
            "",
            *table(
                ["kind of operator", "share"],
                [[kind, f"{share:.1%}"] for kind, share in sorted(dit["shares"].items(), key=lambda item: -item[1])],
            ),
        ]
    lines += table(
        ["cold process", "seconds", "peak MiB"],
        [[f"`{name}`", shown(p["seconds"], "s"), p["peak_mib"]] for name, p in cold["processes"].items()],
    )
    over, over_hoisted = picture["over_gemm_time"][0], picture["over_gemm_time_hoisted"][0]
    above = cold["generate_above_import_torch_s"][0]
    least, most = GOALS.values()
    return lines + [
        goal(
            over <= least,
            f"a {STEPS}-step guided picture takes {picture['seconds'][0]:.2f} s, its {picture['gflop']:.1f} GFLOP need "
            f"{picture['gemm_seconds']:.2f} s at the fp32 GEMM rate: {over:.2f}×, goal {least:g}× "
            f"({over_hoisted:.2f}× with `hoist`); a forward of two small samples spends "
            f"{found['dit']['2']['time_outside_products']:.0%} of its time outside matrix products.",
        ),
        goal(above <= most, f"cold `generate` is {above:.2f} s above `import torch`, goal {most:g} s."),
        "",
    ]
