# Generated from notebooks/source/12_memory_manager.py by `course export`.
# Do not edit: change the chapter and export again.

import math
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from diffusion_engine.attention import score_bytes
from diffusion_engine.dit import DiTConfig, patch_grid
from diffusion_engine.vae import VAE, Decoder, VAEConfig, even_tiles, receptive_radius, tiled_decode


def storages(value: Any) -> dict[int, torch.UntypedStorage]:
    """The storages behind all tensors in ``value`` (tuples, lists and dicts are looked into), each once, by address."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def tensor_bytes(value: Any) -> int:
    """Σ bytes of the storages behind all tensors in ``value``: a view is free, yet it keeps its whole storage."""
    return sum(storage.nbytes() for storage in storages(value).values())


def weight_bytes(*modules: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied weights count once."""
    return tensor_bytes([[*module.parameters(), *module.buffers()] for module in modules])


def latent_bytes(shape: Sequence[int], batch: int = 1, itemsize: int = 4) -> int:
    """B · C · h · w · itemsize: one batch of latents of ``shape`` (C, h, w) or (C, T, h, w)."""
    return batch * math.prod(shape) * itemsize


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside this block: ``now`` alive, ``peak`` at the most; ``allocations`` counts them.

    An operation's output is new unless it shares its storage with an argument: views and in-place writes bring nothing,
    weights and inputs from outside are not counted. What a kernel borrows while it runs, and what NumPy holds, is not
    seen.
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.allocations = 0, 0, 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = () if func is torch.ops.aten.lift_fresh.default else storages((args, kwargs))  # torch.tensor is new
        for key, storage in storages(out).items():
            if key not in given and key not in self._alive:
                self._alive.add(key)
                self.now, self.allocations = self.now + storage.nbytes(), self.allocations + 1
                weakref.finalize(storage, self._free, key, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


class LatentBuffer:
    """Two latents allocated once: a solver reads ``front`` and writes ``back``, then `swap` exchanges the two names.

    Hand it to `denoise` or `generate`; one run at a time. Both addresses stay for good, as a captured graph needs them to.

    Args:
        shape: of a batch, (B, C, H, W) or (B, C, T, H, W). dtype: of the latents. device: where they live.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.front = torch.zeros(*shape, dtype=dtype, device=device)
        self.back = torch.zeros_like(self.front)

    def load(self, latents: Tensor) -> Tensor:
        """Copy ``latents`` into ``front`` and return it.

        Raises:
            ValueError: another shape, dtype or kind of device than the buffer's.
        """
        mine, given = ((tuple(x.shape), x.dtype, x.device.type) for x in (self.front, latents))
        if given != mine:
            raise ValueError(f"latents are {given}, the buffer is {mine}; try LatentBuffer{given}")
        return self.front.copy_(latents)

    def swap(self) -> None:
        """``back``, just written, becomes ``front``; no number is copied."""
        self.front, self.back = self.back, self.front


def activation_bytes(
    config: DiTConfig,
    grid: tuple[int, int],
    text_tokens: int,
    batch: int = 1,
    itemsize: int = 4,
    fused: bool = True,
    chunk: int | None = None,
) -> int:
    """Peak of what one forward of a `DiT` makes, without gradients; T = N + M tokens of width D, s bytes a number.

    A parallel block: B · s · D · (12 T + M + 4), at the joining of attention and MLP; a joint block:
    B · s · D · (max(6 T, 2 T + 6 N, 2 T + 6 M) + 13), in attention or in one of the MLPs. The `Conditions` lie
    beside: B · s · D · M + s · D · N.

    Args:
        config, grid, text_tokens, batch: as in `flop_count`.
        itemsize: s.
        fused: False where attention lays its scores out: two of `score_bytes` then stand beside 6 T.
        chunk: queries that attention handles at a time.
    """
    n, m, unit = math.prod(grid), text_tokens, batch * itemsize * config.width
    t, rows = n + m, min(chunk or n + m, n + m)
    scores = 0 if fused else 2 * score_bytes(batch, config.heads, rows, t, itemsize)
    attending = (6 * t + (rows if chunk else 0)) * unit + scores
    parallel = max(12 * t * unit, attending) + (m + 4) * unit
    joint = max((2 * t + 6 * max(n, m)) * unit, attending) + 13 * unit
    block = max(parallel * (config.parallel_depth > 0), joint * (config.joint_depth > 0))
    return block + m * unit + n * unit // batch


def decode_bytes(
    config: VAEConfig,
    height: int,
    width: int,
    batch: int = 1,
    itemsize: int = 4,
    tile: int | None = None,
    overlap: int = 8,
) -> int:
    """Peak of decoding (B, C, h, w) latents: three feature maps at half resolution, B · s · h · w · (6 · width + C + 4).

    In tiles the same for one tile, beside the whole picture (48 numbers a latent), its weights and the last part.

    Args:
        height, width: h and w in latents. tile, overlap: as in `tiled_decode`; None decodes the whole at once.
    """
    features, pixels = 6 * config.width + config.latent_channels + 4, config.factor**2
    if tile is None:
        return batch * itemsize * height * width * features
    part = math.prod(stop - start for start, stop in (even_tiles(side, tile, overlap)[0] for side in (height, width)))
    joined = 4 * pixels * (height * width * (3 * batch + 1) + 2 * part)  # always fp32
    return joined + batch * itemsize * part * (features + 3 * pixels)


class PeakMeter:
    """A meter for `generate`, as `Stopwatch` is, that counts bytes and never time: watching makes everything slower.

    ``with meter("decode"): …`` sets ``peak_bytes["decode"]``: the most that stood above ``baseline`` at once, what earlier
    stages left alive included. On CUDA the allocator's own peak, reset for each stage; elsewhere `LiveBytes`.

    Args:
        held: modules, tensors or nested tensors that are there before: ``baseline`` is their bytes (on CUDA: all that
            is allocated).
        device: where the work is done.
    """

    def __init__(self, *held: Any, device: torch.device | str = "cpu"):
        self.device, self.peak_bytes, self._live = torch.device(device), {}, LiveBytes()
        self.baseline = tensor_bytes([[*h.parameters(), *h.buffers()] if isinstance(h, nn.Module) else h for h in held])
        if self.device.type == "cuda":
            self.baseline = torch.cuda.memory_allocated(self.device)

    @property
    def total(self) -> int:
        """baseline + the largest peak."""
        return self.baseline + max(self.peak_bytes.values(), default=0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._live.peak = self._live.now
        try:
            with nullcontext() if cuda else self._live:
                yield
        finally:
            peak = torch.cuda.max_memory_allocated(self.device) - self.baseline if cuda else self._live.peak
            self.peak_bytes[stage] = max(self.peak_bytes.get(stage, 0), peak)


UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_bytes(size: int | str) -> int:
    """``"2 GB"`` → 2 000 000 000, ``"1.5GiB"`` → 1.5 · 2³⁰; a whole number is bytes already.

    Raises:
        ValueError: no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(k|[KMGT]i|[MGT]|)B?\s*", str(size))
    count = int(float(match[1]) * UNITS[match[2]]) if match and not isinstance(size, bool) else 0
    if count < 1:
        raise ValueError(f'{size!r} is no size in bytes; try "2 GB", "512 MiB" or a whole number')
    return count


def format_bytes(count: int) -> str:
    """Three digits in decimal units, rounded up: 55 779 696 → ``"55.8 MB"``, so that `parse_bytes` reads no less."""
    for prefix in ("", "k", "M", "G", "T"):
        unit = UNITS[prefix]
        digits = max(0, 3 - len(str(count // unit))) if prefix else 0
        rounded = -(-count * 10**digits // unit) / 10**digits
        if rounded < 1000 or prefix == "T":
            return f"{rounded:.{digits}f} {prefix}B"


@dataclass(frozen=True)
class Plan:
    """How to stay below a budget; every choice is exact. ``str(plan)`` says what was chosen, and why.

    ``batched_cfg`` is for `guided_velocity`, ``attention_chunk`` for `DiT`, the rest for `planned_decode`.
    """

    budget: int
    weights: int
    batched_cfg: bool
    attention_chunk: int | None
    vae_batch: int | None  # pictures decoded at a time; None: all
    vae_tile: int | None
    vae_overlap: int
    peak_bytes: dict[str, int]  # expected, by stage, above the weights
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def planned_decode(vae: VAE, latents: Tensor, plan: Plan) -> Tensor:
    """``vae.decode(latents)``, as many pictures at a time and in such tiles as the plan says; equal to 1e-5."""
    tile, overlap = plan.vae_tile, plan.vae_overlap
    parts = latents.split(plan.vae_batch or len(latents))
    pictures = [vae.decode(part) if tile is None else tiled_decode(vae, part, tile, overlap) for part in parts]
    return torch.cat(pictures) if len(pictures) > 1 else pictures[0]


@dataclass(frozen=True)
class _Job:
    """What is to be drawn, sides in latents; each stage's peak above the weights, with what is carried along."""

    dit: DiTConfig
    vae: VAEConfig
    height: int
    width: int
    text_tokens: int
    batch: int
    itemsize: int
    guided: bool
    fused: bool
    overlap: int

    def carried(self, latents: int) -> int:
        """Prompt embeddings of both sides, and so many batches of latents."""
        prompts = (1 + self.guided) * self.batch * (self.text_tokens + 1) * self.dit.text_width * self.itemsize
        return prompts + latents * latent_bytes((self.dit.latent_channels, self.height, self.width), self.batch)

    def encode(self) -> int:
        return 3 * self.carried(0) + 11 * self.text_tokens * self.dit.text_width * self.itemsize  # one at a time

    def denoise(self, batched: bool, chunk: int | None) -> int:
        grid, both = patch_grid(self.height, self.width, self.dit.patch), self.guided and batched
        sizes = grid, self.text_tokens, (1 + both) * self.batch, self.itemsize
        carried = self.carried(8) + both * self.carried(0)  # noise, the pair, velocities; prompts stacked
        return activation_bytes(self.dit, *sizes, self.fused, chunk) + carried

    def decode(self, batch: int | None, tile: int | None) -> int:
        done = 4 * 3 * self.vae.factor**2 * self.height * self.width * self.batch  # all pictures, fp32
        sizes = self.height, self.width, batch or self.batch, self.itemsize
        peak = decode_bytes(self.vae, *sizes, tile, self.overlap) + (done if batch else 0)
        return max(peak, 4 * done) + self.carried(2)  # at the end they become bytes

    def ways(self) -> tuple[dict, dict]:
        """Peak of every way to denoise and to decode, from the fastest to the smallest."""
        tokens = math.prod(patch_grid(self.height, self.width, self.dit.patch)) + self.text_tokens
        chunks = [] if self.fused else [2**k for k in range((tokens - 1).bit_length() - 1, 3, -1)]
        guidance = [(True, None)] + [(not self.guided, chunk) for chunk in [None] * self.guided + chunks]
        halves = [(self.batch >> k, None) for k in range(1, self.batch.bit_length())]
        tiles = [(1, tile) for tile in range(max(self.height, self.width) - 1, 2 * self.overlap - 1, -1)]
        decoding = [(None, None), *halves, *tiles]
        return {way: self.denoise(*way) for way in guidance}, {way: self.decode(*way) for way in decoding}


def _reasons(job: _Job, guidance: tuple, pieces: tuple, denoising: dict, decoding: dict) -> Iterator[str]:
    """One line a stage: what it takes, what is done, and what the fastest way would have taken."""
    (batched, chunk), (pictures, tile) = guidance, pieces
    how = f"guidance in {'one forward' if batched else 'two forwards'}" if job.guided else "no guidance"
    how += f", attention by {chunk} queries" if chunk else ""
    what = f"{pictures or 'all'} of {job.batch} pictures at a time"
    if tile:
        tiles = "×".join(str(len(even_tiles(side, tile, job.overlap))) for side in (job.height, job.width))
        what += f", in {tiles} tiles that share {job.overlap} latents"
    for stage, said, way, ways in (("denoise", how, guidance, denoising), ("decode", what, pieces, decoding)):
        fastest = next(iter(ways))
        instead = "" if way == fastest else f", instead of {format_bytes(ways[fastest])}"
        yield f"{stage} {format_bytes(ways[way])}: {said}{instead}"


RESERVE = 1.1  # peaks are expected a tenth higher than the formulas say


def plan_memory(
    budget: int | str,
    dit: DiTConfig,
    vae: VAEConfig,
    *,
    height: int,
    width: int,
    text_tokens: int,
    batch: int = 1,
    weights: int = 0,
    itemsize: int = 4,
    guided: bool = True,
    fused: bool = True,
) -> Plan:
    """The fastest way that fits: weights + 1.1 · max(encode, denoise, decode) ≤ budget.

    Denoising gives up batched guidance first, then, where attention is not fused, goes by ever smaller chunks; decoding
    goes by fewer pictures at a time, then by tiles. These overlap by 2 · radius + 1, so that they are exact, and are no
    smaller than twice that: below, most of the work would be done again.

    Args:
        budget: bytes, or a text for `parse_bytes`.
        height, width: pixels. batch: pictures. text_tokens: M of the longest prompt.
        weights: bytes that are always there. itemsize: bytes a number of activations.
        guided: whether there is an unconditional side. fused: see `activation_bytes`.

    Raises:
        ValueError: the budget is too small for every way (names the smallest that is enough), a side is no multiple of
            what the model draws, or no picture is asked for.
    """
    budget, step = parse_bytes(budget), vae.factor * dit.patch
    for name, count, unit in (("height", height, step), ("width", width, step), ("batch", batch, 1)):
        if count < 1 or count % unit:
            near = max(1, round(count / unit)) * unit
            raise ValueError(f"{name} {count} is not a positive multiple of {unit}; try {near}")
    with torch.device("meta"):  # no weights are made
        overlap = math.ceil(2 * receptive_radius(Decoder(vae)) + 1)
    sides = height // vae.factor, width // vae.factor
    job = _Job(dit, vae, *sides, text_tokens, batch, itemsize, guided, fused, overlap)
    denoising, decoding = job.ways()
    least = weights + math.ceil(RESERVE * max(job.encode(), min(denoising.values()), min(decoding.values())))
    if budget < least:
        needs = f"{format_bytes(budget)} cannot hold {batch} × {height}×{width} pixels"
        raise ValueError(f"{needs}; try {format_bytes(least)}, or fewer pictures at a time")
    fits = [next(way for way in ways if RESERVE * ways[way] <= budget - weights) for ways in (denoising, decoding)]
    peaks = {"encode": job.encode(), "denoise": denoising[fits[0]], "decode": decoding[fits[1]]}
    reasons = _reasons(job, *fits, denoising, decoding)
    head = (
        f"budget {format_bytes(budget)}, of which weights {format_bytes(weights)}, and a tenth of the rest in reserve"
    )
    return Plan(budget, weights, *fits[0], *fits[1], overlap, peaks, (head, *reasons))


def checkpointed(block: nn.Module, *arguments: Any) -> Any:
    """block(*arguments) that keeps only its arguments for the backward pass, and runs the block again there.

    Hand it to a network: ``dit(…, run_block=checkpointed)``. The same gradients for about a third more arithmetic; the
    block must draw no random numbers.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
