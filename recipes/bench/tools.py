"""What the sections share: the model, the machine's limits, counting, and numbers in the form in which they are kept."""

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from diffusion_engine import TextToImage, __version__
from diffusion_engine.model_folder import Model, load_model
from diffusion_engine.optimizations import Timing, measure
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.request import recommended
from diffusion_engine.text_conditioning import PromptEmbeds, encode_prompt, stack_prompts

PROMPT, STEPS, GEMM = "red apple", 28, 2048


@dataclass
class Bench:
    """One run: a progress bar, the shipped model, and the limits of the machine, measured once."""

    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))

    def now(self, what: str) -> None:
        """Say on the bar what is being measured."""
        self.bar.set_postfix_str(what)

    @cached_property
    def model(self) -> Model:
        """The shipped model on the CPU, fp32."""
        return load_model()

    @cached_property
    def engine(self) -> TextToImage:
        """The shipped model as an engine."""
        return TextToImage.from_pretrained(device="cpu")

    @property
    def guidance(self) -> float:
        """What the model recommends."""
        return recommended(self.model.config)["guidance_scale"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, h, w) of the size that the model recommends."""
        best = recommended(self.model.config)
        return self.engine.latent_shape(best["height"], best["width"])

    def embeds(self, batch: int) -> PromptEmbeds:
        """One prompt's embeddings, ``batch`` times."""
        return stack_prompts([encode_prompt(self.model.text_encoder, self.model.tokenizer, PROMPT)] * batch)

    def forward(self, batch: int) -> Callable[[], Tensor]:
        """A run of the DiT at one batch size."""
        embeds, latents, t = self.embeds(batch), initial_noise(range(batch), self.shape), torch.full((batch,), 500.0)
        return torch.inference_mode()(lambda: self.model.dit(latents, t, *embeds))

    @cached_property
    def limits(self) -> dict:
        """GEMM rates in FLOP/s with their sizes, and copy bandwidth in bytes a second."""
        self.now("the machine's limits")
        rates = {name: gemm_rate(dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
        return {
            **{f"{name}_flops": rate for name, (rate, _) in rates.items()},
            **{f"{name}_gemm_size": size for name, (_, size) in rates.items()},
            "bandwidth": copy_bandwidth(),
        }

    @property
    def rate(self) -> float:
        """FLOP/s of large fp32 products."""
        return self.limits["fp32_flops"]

    @cached_property
    def machine(self) -> dict:
        """What the numbers were measured on."""
        limits = self.limits
        return {
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "engine": __version__,
            **{f"{name}_gflops": round(limits[f"{name}_flops"] / 1e9, 2) for name in ("fp32", "bf16")},
            **{f"{name}_gemm_size": limits[f"{name}_gemm_size"] for name in ("fp32", "bf16")},
            "bandwidth_gbs": round(limits["bandwidth"] / 1e9, 2),
        }


def gemm_rate(dtype: torch.dtype) -> tuple[float, int]:
    """FLOP/s of one large square product, 2 · size³ operations, and the size.

    The size is `GEMM`, or a quarter of it where the machine only emulates the type and would need minutes.
    """

    def seconds(size: int) -> float:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        return measure(lambda: a @ b)[0].median

    size = GEMM if seconds(256) * (GEMM / 256) ** 3 < 1 else GEMM // 4
    return 2 * size**3 / seconds(size), size


def copy_bandwidth(mebibytes: int = 256) -> float:
    """Bytes a second that a copy moves, read and written counted, in tensors larger than any cache."""
    source = torch.ones(mebibytes * 2**18)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source))[0].median


def count_flops(run: Callable[[], object]) -> int:
    """Operations of all matrix products and convolutions in a run, attention's included."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def products(forward: Callable[[], object]) -> Callable[[], None]:
    """A run of a forward's linear layers and fused attention alone, on their own shapes, with nothing between them."""
    calls = []

    def keep(function: Callable) -> Callable:
        def kept_call(x: Tensor, *rest, **options) -> Tensor:
            calls.append((function, torch.randn_like(x), rest, options))
            return function(x, *rest, **options)

        return kept_call

    with ExitStack() as stack:
        for name in ("linear", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(F, name, keep(getattr(F, name))))
        forward()

    @torch.inference_mode()
    def run() -> None:
        for function, x, rest, options in calls:
            function(x, *rest, **options)

    return run


KINDS = {  # operator names, as the profiler gives them
    "matrix products": ("addmm", "mm", "bmm", "baddbmm", "linear", "matmul", "mkldnn_convolution"),
    "attention": ("scaled_dot_product", "flash_attention", "softmax"),
    "activations": ("silu", "silu_", "gelu", "gelu_", "sigmoid", "relu", "clamp_min"),
    "norms": ("layer_norm", "rms_norm", "rsqrt", "mean", "pow", "linalg_vector_norm", "square"),
    "element by element": ("add", "add_", "mul", "mul_", "sub", "addcmul", "lerp", "cos", "sin", "div", "complex"),
    "moving data": ("copy_", "cat", "clone", "contiguous", "stack", "constant_pad_nd", "fill_", "_to_copy", "index"),
}


def seconds_by_kind(forward: Callable[[], object], repeats: int = 10) -> dict[str, float]:
    """Where the time of one forward goes, by kind of operator; the last entry is all that is no operator of these."""
    forward()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        begun = time.perf_counter()
        for _ in range(repeats):
            forward()
        whole = (time.perf_counter() - begun) / repeats
    spent = dict.fromkeys(KINDS, 0.0)
    for event in prof.key_averages():
        if kind := kind_of(event.key):
            spent[kind] += event.self_cpu_time_total / 1e6 / repeats
    return spent | {"views, dispatch, Python": whole - sum(spent.values())}


def kind_of(key: str) -> str | None:
    """The kind of an operator, or None for views and what is no operator."""
    name = key.removeprefix("aten::")
    for kind, names in KINDS.items():
        if name in names or kind in ("attention", "norms") and any(part in name for part in names[:2]):
            return kind
    return None


def kept(timing: Timing, digits: int = 4) -> list[float]:
    """[median, low, high] with some significant digits, for JSON."""
    return [float(f"{value:.{digits}g}") for value in timing[:3]]


def shown(values: list[float], unit: str = "") -> str:
    """``0.93 (0.90 … 0.97)``; seconds below one as milliseconds."""
    median, low, high = values
    if unit == "s":
        return str(Timing(median, low, high, ()))
    return f"{median:.2f}{unit} ({low:.2f} … {high:.2f})"


def table(head: list[str], rows: list[list]) -> list[str]:
    """A Markdown table; numbers stand right."""
    align = ["---" if column == 0 else "---:" for column in range(len(head))]
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, align, *rows)] + [""]


def goal(met: bool, text: str) -> str:
    """One line: the arithmetic of a goal, and whether it is met."""
    return f"- {'met' if met else '**missed**'}: {text}"


def processor_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
