# Generated from notebooks/source/11_training.py by `course export`.
# Do not edit: change the chapter and export again.

import io
import json
import math
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from tqdm import tqdm

from diffusion_engine.rectified_flow import interpolate, velocity_target
from diffusion_engine.scheduler import shift_sigmas
from diffusion_engine.text_conditioning import PromptEmbeds


def sample_sigmas(batch: int, generator: Generator, mean: float = 0.0, std: float = 1.0, shift: float = 1.0) -> Tensor:
    """Noise levels of one batch: σ = shift∘sigmoid(mean + std · n) with n ~ N(0, 1), the logit-normal of SD3.

    Args:
        batch: how many, B.
        generator: a CPU generator.
        mean: centre on the logit axis; above 0 leans towards noise.
        std: spread on the logit axis.
        shift: k of σ ← k σ / (1 + (k − 1) σ); the same as adding ln k to ``mean``.

    Returns:
        (B,), fp32, inside 0…1.

    Raises:
        ValueError: ``batch`` < 1 or ``std`` ≤ 0.

    Source: Esser et al. 2024 (SD3), §3.1.
    """
    if batch < 1:
        raise ValueError(f"batch {batch} is not a positive number of noise levels; try 1")
    if not std > 0:
        raise ValueError(f"std {std} is not positive; try 1.0")
    logits = mean + std * torch.randn(batch, generator=generator)  # (B,)
    return shift_sigmas(torch.sigmoid(logits), shift)


def flow_matching_loss(
    model: Callable[[Tensor, Tensor, PromptEmbeds], Tensor],
    data: Tensor,
    prompts: PromptEmbeds,
    generator: Generator,
    mean: float = 0.0,
    std: float = 1.0,
    shift: float = 1.0,
) -> Tensor:
    """mean ‖ model(x_σ, 1000 σ, prompts) − (ε − x0) ‖² over one batch, σ from `sample_sigmas`, ε ~ N(0, 1).

    Args:
        model: velocity network, (x (B, …), t (B,) in 0…1000, prompts) → (B, …).
        data: clean latents x0, (B, C, H, W) or (B, C, T, H, W), about unit variance.
        prompts: what the model reads, B rows.
        generator: a CPU generator; gives ε first, then σ.
        mean, std, shift: see `sample_sigmas`.

    Returns:
        A scalar, fp32.

    Raises:
        ValueError: what the model gives is not shaped like the data.

    Source: Lipman et al. 2023 (flow matching); Liu et al. 2023 (rectified flow).
    """
    noise = torch.randn(data.shape, generator=generator).to(data)
    sigma = sample_sigmas(len(data), generator, mean, std, shift).to(data.device)
    velocity = model(interpolate(data, noise, sigma), 1000 * sigma, prompts)
    if velocity.shape != data.shape:
        raise ValueError(f"the model gives {tuple(velocity.shape)}; expected the data's shape, {tuple(data.shape)}")
    return F.mse_loss(velocity.float(), velocity_target(data, noise).float())


def drop_condition(
    prompts: PromptEmbeds, empty: PromptEmbeds, probability: float, generator: Generator
) -> PromptEmbeds:
    """Replace whole prompts by the empty one, each row with ``probability``: what makes guidance possible later.

    Args:
        prompts: B rows: tokens (B, M, D), mask (B, M), pooled (B, D).
        empty: the embedded empty prompt, one row.
        probability: 0…1; 0.1 by custom.
        generator: a CPU generator.

    Returns:
        Embeddings of B rows, as long as the longer of both.

    Raises:
        ValueError: ``probability`` outside 0…1, or ``empty`` has not one row.

    Source: Ho & Salimans 2022, §3.2.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability {probability} is outside 0…1; try 0.1")
    if len(empty.pooled) != 1:
        raise ValueError(f"empty has {len(empty.pooled)} rows; expected 1, the embedded empty prompt")
    length = max(prompts.mask.shape[1], empty.mask.shape[1])
    prompts, empty = _pad(prompts, length), _pad(empty, length)
    drop = (torch.rand(len(prompts.pooled), generator=generator) < probability).to(prompts.pooled.device)  # (B,)
    pairs = zip(empty, prompts)
    return PromptEmbeds(*(torch.where(drop.reshape(-1, *[1] * (p.ndim - 1)), e, p) for e, p in pairs))


def _pad(prompts: PromptEmbeds, length: int) -> PromptEmbeds:
    """Masked places behind each prompt, up to ``length``."""
    extra = length - prompts.mask.shape[1]
    return PromptEmbeds(F.pad(prompts.tokens, (0, 0, 0, extra)), F.pad(prompts.mask, (0, extra)), prompts.pooled)


class EMA:
    """Exponential moving average of a model's weights: s ← d s + (1 − d) θ, with d_n = min(decay, n / (n + warmup)).

    Args:
        model: what to follow; the average starts at its weights.
        decay: the final d, which remembers about 1 / (1 − d) steps.
        warmup: 10 lets the average forget the random start quickly; 0 keeps d constant.

    Raises:
        ValueError: ``decay`` outside 0…1, 1 excluded.

    Source: Polyak & Juditsky 1992; the growing d follows TensorFlow's ``ExponentialMovingAverage``.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, warmup: float = 10.0):
        if not 0 <= decay < 1:
            raise ValueError(f"decay {decay} is outside 0…1, or is 1 and would never move; try 0.999")
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Follow the model by one step; call it after the optimizer's step."""
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + self.warmup))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.shadow[name].lerp_(value, 1 - decay)
            else:
                self.shadow[name].copy_(value)

    def copy_to(self, model: nn.Module) -> nn.Module:
        """Load the average into ``model`` and return it."""
        model.load_state_dict(self.shadow)
        return model


def learning_rate(step: int, steps: int, warmup: int = 0, decay: int | None = None, cosine: bool = False) -> float:
    """Share of the peak rate at ``step``: min(1, (step + 1) / warmup, f((steps − step) / decay)).

    Args:
        step: counted from 0.
        steps: N, the whole run.
        warmup: steps of the rise.
        decay: steps of the descent; None takes all that follow the rise.
        cosine: f(u) = (1 − cos πu) / 2 instead of u.

    Raises:
        ValueError: ``step`` outside 0…steps − 1, or rise and descent longer than the run.
    """
    decay = steps - warmup if decay is None else decay
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is outside 0…{steps - 1}")
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(
            f"warmup {warmup} and decay {decay} do not fit into {steps} steps; try a sum of at most {steps}"
        )
    rise = (step + 1) / max(warmup, 1)
    fall = min(1.0, (steps - step) / max(decay, 1))
    return min(1.0, rise, (1 - math.cos(math.pi * fall)) / 2 if cosine else fall)


def step_generator(seed: int, step: int) -> Generator:
    """All randomness of one training step, a function of (seed, step) alone: nothing else need be saved to resume.

    PyTorch's CPU generator reads only 32 bits of its seed, so both numbers are mixed into 32.
    """
    return Generator().manual_seed((seed * 2_654_435_761 + step) % 2**32)


@dataclass
class TrainState:
    """Everything that changes in training; what a checkpoint holds.

    Each group of the optimizer keeps its peak rate in ``initial_lr``. ``loss`` is smoothed over about twenty steps,
    ``seconds`` counts training alone, ``curve`` has one entry a logged step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA
    seed: int = 0
    step: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def train_step(state: TrainState, loss: Callable[[Generator], Tensor], factor: float = 1.0, clip: float = 1.0) -> float:
    """One step: loss(generator) → gradients → clip each group's norm → optimizer at ``factor`` × peak rate → EMA.

    Returns:
        The loss of this batch.

    Raises:
        FloatingPointError: the loss or its gradient is NaN or infinite; the weights are left as they were.
    """
    value = loss(step_generator(state.seed, state.step))
    if not torch.isfinite(value):
        raise FloatingPointError(f"the loss is {value.item()} at step {state.step}; try a lower learning rate")
    state.optimizer.zero_grad()
    value.backward()
    for group in state.optimizer.param_groups:
        norm = nn.utils.clip_grad_norm_(group["params"], clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm} at step {state.step}; try a lower learning rate")
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    state.optimizer.step()
    state.ema.update(state.model)
    state.loss = value.item() if state.step == 0 else 0.95 * state.loss + 0.05 * value.item()
    state.step += 1
    return value.item()


PLAIN = ("seed", "step", "loss", "seconds", "curve")  # what a checkpoint holds besides tensors


def save_checkpoint(path: Path | str, state: TrainState) -> None:
    """Write the whole state to ``path`` and the curve beside it (.jsonl); no reader ever sees half a file."""
    plain = {name: getattr(state, name) for name in PLAIN}
    ema = {"shadow": state.ema.shadow, "updates": state.ema.updates}
    file = io.BytesIO()
    torch.save(plain | {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "ema": ema}, file)
    _replace(Path(path), file.getvalue())
    _replace(Path(path).with_suffix(".jsonl"), "".join(json.dumps(entry) + "\n" for entry in state.curve).encode())


def _replace(path: Path, data: bytes) -> None:
    """Write beside ``path``, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path | str, state: TrainState) -> TrainState:
    """Put a checkpoint into ``state``, whose model and optimizer are built as they were; return it.

    Raises:
        ValueError: the file is no whole checkpoint, or was made with another seed, model or optimizer; ``state`` is as before.
    """
    try:
        payload = torch.load(io.BytesIO(Path(path).read_bytes()), weights_only=True)
        found = payload["seed"], {name: value.shape for name, value in payload["model"].items()}
        ema, plain = payload["ema"]["shadow"], {name: payload[name] for name in PLAIN}
        updates = payload["ema"]["updates"]
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no whole checkpoint ({type(error).__name__}); delete it to begin again") from error
    if found != (state.seed, {name: value.shape for name, value in state.model.state_dict().items()}):
        raise ValueError(f"{path} belongs to another run: seed {found[0]}, not {state.seed}, or another model")
    try:
        state.optimizer.load_state_dict(payload["optimizer"])  # looks before it changes anything
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} belongs to another run: its optimizer differs ({error})") from error
    state.model.load_state_dict(payload["model"])
    state.ema.shadow, state.ema.updates = ema, updates
    for name, value in plain.items():
        setattr(state, name, value)
    return state


def train(
    state: TrainState,
    loss: Callable[[Generator], Tensor],
    steps: int,
    factor: Callable[[int], float] = lambda step: 1.0,
    *,
    clip: float = 1.0,
    checkpoint: Path | str | None = None,
    every: int = 200,
    log_every: int = 50,
    measure: Callable[[TrainState], dict[str, float]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: bool = True,
) -> TrainState:
    """Train from ``state.step`` to ``steps``, with a bar and its ETA, a curve, and checkpoints.

    Args:
        state: where to begin; changed in place.
        loss: one batch's loss; draws everything random from the generator that it is handed.
        factor: step → share of the peak learning rate.
        clip: largest gradient norm of a parameter group.
        checkpoint: file written every ``every`` steps and at the end, the curve beside it as JSON lines (.jsonl).
        log_every: steps between two entries of the curve: step, loss, seconds trained.
        measure: called before each checkpoint; its numbers join the curve.
        stop: asked after each step; True ends the run with a checkpoint.
        progress: show the bar on stderr; into a file it writes only twice a minute.

    Returns:
        ``state``.

    Raises:
        ValueError: ``every`` or ``log_every`` below 1.
    """
    for name, value in (("every", every), ("log_every", log_every)):
        if value < 1:
            raise ValueError(f"{name} {value} is below 1; try 1")
    shown = {"disable": not progress, "mininterval": 0.5 if sys.stderr.isatty() else 30.0, "smoothing": 0.02}
    with tqdm(total=steps, initial=min(state.step, steps), unit="step", **shown) as bar:
        last = state.step >= steps
        while not last:
            begun = time.perf_counter()
            train_step(state, loss, factor(state.step), clip)
            state.seconds += time.perf_counter() - begun
            bar.set_postfix(loss=f"{state.loss:.4f}", refresh=False)
            bar.update()
            last = state.step >= steps or stop()
            saving = last or state.step % every == 0
            if saving or state.step % log_every == 0:
                entry = {"step": state.step, "loss": round(state.loss, 6), "seconds": round(state.seconds, 1)}
                state.curve.append(entry | (measure(state) if saving and measure else {}))
            if saving and checkpoint is not None:
                save_checkpoint(checkpoint, state)
    return state
