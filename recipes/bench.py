"""``make bench``: what a picture costs on this machine, next to what its arithmetic must cost.

    python -m recipes.bench             # prints a table and writes out/bench.json

The machine's own rate for large matrix products (GEMM), fp32 and bf16, is measured in the same run and quoted as the limit.
Ratios and shares travel between machines, seconds do not. Each number is the median of at least five runs after a warm-up,
with the smallest and the largest; runs that are compared alternate. A missed goal is printed with its arithmetic.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from diffusion_engine import TextToImage
from diffusion_engine.files import SHIPPED_MODEL, TOKENIZER, WEIGHTS, Model, load_model, recommended, write_files
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.text_conditioning import PromptEmbeds, encode_prompt, stack_prompts

PROMPT, STEPS, GEMM = "red apple", 28, 2048
GOALS = {"picture_over_gemm_time": 1.5, "cold_generate_above_import_torch_s": 3.0, "step_over_diffusers": 1.0}
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
KINDS = {  # operator names, as the profiler gives them
    "matrix products": ("addmm", "mm", "bmm", "baddbmm", "linear", "matmul"),
    "attention": ("scaled_dot_product", "flash_attention", "softmax"),
    "norms": ("layer_norm", "rms_norm", "rsqrt", "mean", "pow"),
    "element by element": ("add", "add_", "mul", "mul_", "sub", "silu", "gelu", "sigmoid", "lerp", "cos", "sin", "div"),
    "moving data": ("copy_", "cat", "clone", "contiguous", "stack", "constant_pad_nd", "fill_", "_to_copy", "index"),
}


class Timing(NamedTuple):
    """Seconds: median, smallest, largest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        unit, factor = ("s", 1) if self.median >= 1 else ("ms", 1e3)
        return f"{self.median * factor:.3g} {unit} ({self.low * factor:.3g} … {self.high * factor:.3g})"


def measure(*runs: Callable[[], object], repeats: int = 7, warmup: int = 2) -> list[Timing]:
    """Time several runs in turn, so that a busy moment of the machine hits all of them alike."""
    for run in runs * warmup:
        run()
    seconds = [[] for _ in runs]
    for _ in range(repeats):
        for run, kept in zip(runs, seconds):
            begun = time.perf_counter()
            run()
            kept.append(time.perf_counter() - begun)
    return [Timing(statistics.median(kept), min(kept), max(kept)) for kept in seconds]


# --- the limit -------------------------------------------------------------------------------------------------------


def gemm_rate(dtype: torch.dtype) -> tuple[float, int]:
    """FLOP/s of one large square product, 2 · size³ operations, and the size.

    The size is `GEMM`, or a quarter of it where the machine only emulates the type and would need minutes.
    """
    probe = product_seconds(dtype, 256).median
    size = GEMM if probe * (GEMM / 256) ** 3 < 1 else GEMM // 4
    return 2 * size**3 / product_seconds(dtype, size).median, size


def product_seconds(dtype: torch.dtype, size: int) -> Timing:
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return measure(lambda: a @ b)[0]


def count_flops(run: Callable[[], object]) -> int:
    """Operations of all matrix products and convolutions in a run, attention's included."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


# --- one forward of the DiT ------------------------------------------------------------------------------------------


def embeds_of(model: Model, batch: int) -> PromptEmbeds:
    """One prompt's embeddings, ``batch`` times."""
    one = encode_prompt(model.text_encoder, model.tokenizer, PROMPT)
    return stack_prompts([one] * batch)


def forward_of(model: Model, batch: int) -> Callable[[], Tensor]:
    """A run of the DiT at one batch size."""
    embeds, latents = embeds_of(model, batch), initial_noise(range(batch), latent_shape(model))
    t = torch.full((batch,), 500.0)
    return torch.inference_mode()(lambda: model.dit(latents, t, *embeds))


def latent_shape(model: Model) -> tuple[int, int, int]:
    """(C, h, w) of the size that the model recommends."""
    factor, best = model.vae.config.factor, recommended(model.config)
    sides = [best[side] // factor for side in ("height", "width")]
    return (model.vae.config.latent_channels, *sides)


def linear_products(dit: nn.Module, forward: Callable[[], object]) -> Callable[[], None]:
    """A run of the DiT's linear layers alone, each on its own input shape, with nothing between them."""
    calls, hooks = [], []
    for layer in dit.modules():
        if isinstance(layer, nn.Linear):
            keep = lambda layer, inputs, _: calls.append((torch.randn_like(inputs[0]), layer))  # noqa: E731
            hooks.append(layer.register_forward_hook(keep))
    forward()
    for hook in hooks:
        hook.remove()

    @torch.inference_mode()
    def run() -> None:
        for x, layer in calls:
            F.linear(x, layer.weight, layer.bias)

    return run


def shares_of(forward: Callable[[], object], repeats: int = 10) -> dict[str, float]:
    """Where the time of a forward goes, by kind of operator, as shares of the profiled time."""
    forward()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        begun = time.perf_counter()
        for _ in range(repeats):
            forward()
        wall = (time.perf_counter() - begun) * 1e6
    spent = dict.fromkeys(KINDS, 0.0)
    for event in prof.key_averages():
        if kind := kind_of(event.key):
            spent[kind] += event.self_cpu_time_total
    shares = {kind: time_ / wall for kind, time_ in spent.items()}
    return shares | {"views, dispatch, Python": 1 - sum(shares.values())}


def kind_of(key: str) -> str | None:
    """The kind of an operator, or None for views and what is no operator."""
    name = key.removeprefix("aten::")
    for kind, names in KINDS.items():
        if name in names or kind in ("attention", "norms") and any(part in name for part in names[:2]):
            return kind
    return None


def dit_report(model: Model, batch: int, rate: float) -> dict:
    """Time, FLOPs and share of the GEMM rate of one forward, and what eats the rest."""
    forward = forward_of(model, batch)
    flops = count_flops(forward)
    whole, products = measure(forward, linear_products(model.dit, forward), repeats=15)
    return {
        "seconds": whole,
        "gflop": flops / 1e9,
        "share_of_gemm_rate": flops / whole.median / rate,
        "share_of_gemm_rate_linear_layers_alone": flops / products.median / rate,
        "time_outside_linear_layers": 1 - products.median / whole.median,
        "shares": shares_of(forward),
    }


# --- against diffusers -----------------------------------------------------------------------------------------------


def against_diffusers(model: Model, guidance: float) -> dict:
    """One batched guided velocity, ours against diffusers' blocks with the same weights; equal to 1e-5 before any timing."""
    from recipes.diffusers_blocks import assemble

    theirs = assemble(model.dit)
    embeds, latents = embeds_of(model, 1), initial_noise([0], latent_shape(model))

    def step_of(dit: nn.Module) -> Callable[[], Tensor]:
        call = lambda x, t, cond: dit(x, t, *cond)  # noqa: E731
        velocity = guided_velocity(call, embeds, embeds, guidance, batched=True)
        return torch.inference_mode()(lambda: velocity(latents, 0.5))

    ours_step, their_step = step_of(model.dit), step_of(theirs)
    difference = float((ours_step() - their_step()).abs().max())
    if difference > 1e-4:
        raise AssertionError(
            f"diffusers' blocks differ by {difference:.1e}; the comparison would be of different networks"
        )
    ours, other = measure(ours_step, their_step, repeats=31)
    return {"ours": ours, "diffusers": other, "ratio": ours.median / other.median, "max_abs_difference": difference}


# --- whole pictures and cold starts ----------------------------------------------------------------------------------


def picture_report(engine: TextToImage, model: Model, rate: float, step_flops: int) -> dict:
    """A guided picture, stage by stage, against the time that its FLOPs need at the GEMM rate."""
    results = []

    def draw() -> None:
        results.append(engine(PROMPT, num_inference_steps=STEPS))

    whole = measure(draw, repeats=5, warmup=1)[0]
    seconds = {stage: statistics.median(r.seconds[stage] for r in results[1:]) for stage in results[-1].seconds}
    latents = results[-1].latents.float()
    with torch.inference_mode():
        decode = count_flops(lambda: model.vae.decode(latents))
        encode = count_flops(lambda: encode_prompt(model.text_encoder, model.tokenizer, PROMPT))
    flops = STEPS * step_flops + decode + 2 * encode
    return {
        "seconds": whole,
        "stages": seconds,
        "gflop": flops / 1e9,
        "gemm_seconds": flops / rate,
        "over_gemm_time": whole.median * rate / flops,
    }


def cold_report(repeats: int = 5) -> dict:
    """Fresh processes: ``import torch`` alone, the package, its command, and a whole ``generate``; seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        draw = [sys.executable, "-m", "diffusion_engine", "generate", PROMPT, "-o", f"{folder}/apple.png"]
        commands = {
            "import torch": [sys.executable, "-c", "import torch"],
            "import diffusion_engine": [sys.executable, "-c", "import diffusion_engine"],
            "from diffusion_engine import TextToImage": [
                sys.executable,
                "-c",
                "from diffusion_engine import TextToImage",
            ],
            "diffusion-engine --help": [sys.executable, "-m", "diffusion_engine", "--help"],
            "diffusion-engine generate": draw,
        }
        told: dict[str, list[dict]] = {name: [] for name in commands}
        for _ in range(repeats + 1):
            for name, command in commands.items():
                done = subprocess.run([sys.executable, "-S", "-c", LAUNCHER, *command], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{name}: {done.stderr[-500:]}")
                told[name].append(json.loads(done.stdout))
    report = {}
    for name, runs in told.items():
        seconds = [run["seconds"] for run in runs[1:]]  # the first one warms the disk cache
        timing = Timing(statistics.median(seconds), min(seconds), max(seconds))
        report[name] = {"seconds": timing, "peak_bytes": max(run["peak_bytes"] for run in runs)}
    above = report["diffusion-engine generate"]["seconds"].median - report["import torch"]["seconds"].median
    return report | {"generate_above_import_torch_s": above}


# --- everything ------------------------------------------------------------------------------------------------------


def goals(report: dict) -> list[str]:
    """One line a goal: the arithmetic, and whether it is met."""
    picture, cold, other = report["picture"], report["cold"], report["diffusers"]
    lines = [
        (
            picture["over_gemm_time"],
            GOALS["picture_over_gemm_time"],
            f"a {STEPS}-step guided picture: {picture['seconds'].median:.2f} s, its {picture['gflop']:.1f} GFLOP at the "
            f"fp32 GEMM rate need {picture['gemm_seconds']:.2f} s: {picture['over_gemm_time']:.2f}×",
        ),
        (
            cold["generate_above_import_torch_s"],
            GOALS["cold_generate_above_import_torch_s"],
            f"cold generate: {cold['diffusion-engine generate']['seconds'].median:.2f} s, import torch "
            f"{cold['import torch']['seconds'].median:.2f} s: {cold['generate_above_import_torch_s']:.2f} s above",
        ),
        (
            other["ratio"],
            GOALS["step_over_diffusers"],
            f"a batched guided step: {other['ours'].median * 1e3:.1f} ms, on diffusers' blocks "
            f"{other['diffusers'].median * 1e3:.1f} ms: {other['ratio']:.2f}×",
        ),
    ]
    return [f"{'met   ' if value <= goal else 'missed'}  {text}, goal {goal:g}" for value, goal, text in lines]


def table(report: dict) -> list[str]:
    """The report as lines of text."""
    machine, picture = report["machine"], report["picture"]
    lines = [
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}",
        *(
            f"GEMM {name} {machine[f'{name}_gemm_size']}³: {machine[f'{name}_gflops']:.1f} GFLOP/s"
            for name in ("fp32", "bf16")
        ),
        f"weights: {report['weights_mib']:.1f} MiB in fp32, {report['files_mib']:.1f} MiB on disk",
        "",
        f"{STEPS}-step guided picture, warm: {picture['seconds']}",
        *(f"  {stage:10} {seconds * 1e3:9.1f} ms" for stage, seconds in picture["stages"].items()),
    ]
    for batch, dit in report["dit"].items():
        lines += [
            "",
            f"DiT forward, batch {batch}: {dit['seconds']}, {dit['gflop']:.2f} GFLOP, "
            f"{dit['share_of_gemm_rate']:.0%} of the GEMM rate",
            f"  its linear layers alone, back to back: {dit['share_of_gemm_rate_linear_layers_alone']:.0%} of the GEMM rate; "
            f"outside them {dit['time_outside_linear_layers']:.0%} of the time",
            *(f"  {share:6.1%}  {kind}" for kind, share in sorted(dit["shares"].items(), key=lambda item: -item[1])),
        ]
    lines += ["", "cold processes"]
    for name, cold in report["cold"].items():
        if isinstance(cold, dict):
            lines.append(f"  {name:42} {str(cold['seconds']):28} peak {cold['peak_bytes'] / 2**20:.0f} MiB")
    other = report["diffusers"]
    lines += ["", f"one batched guided step: ours {other['ours']}, diffusers' blocks {other['diffusers']}"]
    lines += [f"  same weights, largest difference {other['max_abs_difference']:.1e}", ""]
    return lines + goals(report)


def processor_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.open() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def main(output: Annotated[Path, typer.Option(help="where the JSON goes")] = Path("out/bench.json")) -> None:
    """Measure this machine and the engine on it."""
    with tqdm(total=6, bar_format="{desc:28}{bar} {n}/{total}, {elapsed}", disable=None) as bar:
        bar.set_description("GEMM rate")
        rates = {name: gemm_rate(dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
        limit = rates["fp32"][0]
        model, engine = load_model(), TextToImage.from_pretrained()
        guidance = recommended(model.config)["guidance_scale"]
        parts = (model.dit, model.vae, model.text_encoder)
        report = {
            "machine": {
                "processor": processor_name(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                **{f"{name}_gflops": rate / 1e9 for name, (rate, _) in rates.items()},
                **{f"{name}_gemm_size": size for name, (_, size) in rates.items()},
            },
            "weights_mib": sum(p.numel() * p.element_size() for part in parts for p in part.parameters()) / 2**20,
            "files_mib": model_bytes() / 2**20,
            "dit": {},
        }
        for batch in (2, 32):
            bar.update()
            bar.set_description(f"DiT forward, batch {batch}")
            report["dit"][batch] = dit_report(model, batch, limit)
        bar.update()
        bar.set_description("whole pictures")
        step_flops = int(report["dit"][2]["gflop"] * 1e9)
        report["picture"] = picture_report(engine, model, limit, step_flops)
        bar.update()
        bar.set_description("against diffusers")
        report["diffusers"] = against_diffusers(model, guidance)
        bar.update()
        bar.set_description("cold processes")
        report["cold"] = cold_report()
        bar.update()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_files({output: (json.dumps(report, indent=1) + "\n").encode()})
    for line in [*table(report), "", f"{output}"]:
        typer.echo(line)


def model_bytes() -> int:
    """Size of the shipped model's files."""
    return sum((SHIPPED_MODEL / name).stat().st_size for name in (*WEIGHTS.values(), TOKENIZER, "config.json"))


if __name__ == "__main__":
    typer.run(main)
