"""The shipped model, trained in stages on the emoji data, with chapter 11's module.

    python -m recipes.train vae       # 1: pictures to latents and back
    python -m recipes.train decoder   # after 1, at any time: the decoder alone, the latents stay as they are
    python -m recipes.train text      # 2: captions to the pictures they describe; then the text encoder is frozen
    python -m recipes.train dit       # 3: the velocity field, over what 1 and 2 give
    python -m recipes.train all       # all of them, one after the other
    python -m recipes.train export    # fp16 weights, tokenizer, configuration and hashes into the package

Every stage is seeded. Ctrl-C (or SIGTERM) saves and stops; the same command goes on from there, and ends in the same bits as
a run that was never stopped, on the same machine with the same number of threads. Checkpoints and curves lie in one folder
outside the repository. ``--from-assets`` begins with the shipped weights where a stage has no checkpoint yet.
"""

import json
import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Generator, Tensor, nn

from diffusion_engine.dit import DiT
from diffusion_engine.files import write_files
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.model_folder import SHIPPED_MODEL, WEIGHTS, save_model
from diffusion_engine.rectified_flow import integrate
from diffusion_engine.text_conditioning import (
    PromptEmbeds,
    PromptTokenizer,
    TextEncoder,
    TextEncoderConfig,
    train_tokenizer,
)
from diffusion_engine.training import (
    EMA,
    TrainState,
    drop_condition,
    flow_matching_loss,
    learning_rate,
    load_checkpoint,
    step_generator,
    train,
)
from diffusion_engine.vae import VAE, calibrate, psnr, vae_loss
from recipes.emoji_data import EmojiRecord, load_emoji

FOLDER = Path.home() / ".cache" / "diffusion_engine" / "train"
VOCABULARY = 4000
LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Stage:
    """What is fixed about one stage; ``what`` goes onto the model card."""

    part: str
    steps: int
    batch: int
    what: dict[str, str]


STAGES = {
    "vae": Stage(
        "vae",
        1900,
        32,
        {
            "en": "pictures to latents and back: L1 + 2·MSE + ¼·gradient L1 + 10⁻³·KL; AdamW, EMA 0.995",
            "zh": "图与潜变量互译：L1 + 2·MSE + ¼·梯度 L1 + 10⁻³·KL；AdamW，EMA 0.995",
        },
    ),
    "decoder": Stage(
        "vae",
        160,
        32,
        {
            "en": "the decoder alone, encoder and latents untouched: the same loss, small learning rate; EMA 0.98",
            "zh": "只训练解码器，编码器与潜变量不动：同样的损失，学习率小；EMA 0.98",
        },
    ),
    "text": Stage(
        "text_encoder",
        1100,
        128,
        {
            "en": "captions to the picture at half size through one linear head (MSE), then frozen; Muon and AdamW",
            "zh": "从说明文字经一个线性层猜半尺寸的图（MSE），之后冻结；Muon 与 AdamW",
        },
    ),
    "dit": Stage(
        "dit",
        1200,
        128,
        {
            "en": "the velocity field: logit-normal σ with mean 0.4, 10 % empty prompts; Muon and AdamW, EMA 0.998",
            "zh": "速度场：logit-normal σ，均值 0.4，一成空提示词；Muon 与 AdamW，EMA 0.998",
        },
    ),
}


# --- optimizers ----------------------------------------------------------------------------------------------------------


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push all singular values of each matrix towards 1 by Newton–Schulz: (N, a, b) → (N, a, b).

    X ← 3.4445 X − 4.7750 (X Xᵀ) X + 2.0315 (X Xᵀ)² X. Source: Jordan et al. 2024 (Muon).
    """
    x = matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for weight matrices: W ← (1 − η λ) W − η √max(1, a/b) · orth(g + …).

    Matrices of one shape are handled as one stack, which is several times faster on a CPU than one by one.

    Args:
        params: matrices (a, b).
        lr: η. momentum: of Nesterov's kind. weight_decay: λ.
    """

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            stacks = defaultdict(list)
            for p in group["params"]:
                stacks[p.shape].append(p)
            for (rows, columns), params in stacks.items():
                updates = []
                for p in params:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    momentum = self.state[p]["momentum"]
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(momentum, group["momentum"]))
                for p, update in zip(params, orthogonalise(torch.stack(updates))):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


class Together:
    """Several optimizers as one: what `TrainState` expects of an optimizer."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def adamw(params, lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW as all stages use it."""
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)


def muon_and_adamw(model: nn.Module, lr: float, adamw_decay: float, muon_decay: float, without: str = "") -> Together:
    """Muon for the matrices inside blocks, AdamW for everything else.

    Args:
        without: matrices whose name holds this stay with AdamW; empty for none.
    """
    named = list(model.named_parameters())
    inside = {n for n, p in named if p.ndim == 2 and "blocks" in n and not (without and without in n)}
    muon = Muon([p for n, p in named if n in inside], weight_decay=muon_decay)
    return Together(muon, adamw([p for n, p in named if n not in inside], lr, adamw_decay))


# --- data ----------------------------------------------------------------------------------------------------------------


@cache
def emoji() -> tuple[Tensor, list[EmojiRecord]]:
    """Pictures (N, 3, 64, 64) in −1…1, and their records."""
    images, records = load_emoji()
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous(), records


def labels(language: str) -> list[str]:
    """One label a picture."""
    return [getattr(record, f"label_{language}") for record in emoji()[1]]


def some_tags(record: EmojiRecord, language: str, share: float, generator: Generator) -> str:
    """One to three tags in random order; ``share`` in 0…1 decides how many."""
    tags = getattr(record, f"tags_{language}")
    chosen = torch.randperm(len(tags), generator=generator)[: 1 + int(share * 3)]
    return " ".join(tags[i] for i in chosen.tolist())


def same_pictures() -> Tensor:
    """(N,): two pictures are equal pixel by pixel where these numbers are."""
    return torch.tensor([record.same_as for record in emoji()[1]])


# --- running a stage -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What the command line decides."""

    folder: Path = FOLDER
    steps: int | None = None
    batch: int | None = None
    seed: int = 0
    from_assets: bool = False
    every: int = 200
    progress: bool = True

    def checkpoint(self, stage: str) -> Path:
        return self.folder / stage / "checkpoint.pt"


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """A question whose answer becomes yes with Ctrl-C or SIGTERM, so that a step is never cut in half."""
    asked = []
    previous = {name: signal.signal(name, lambda *_: asked.append(True)) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)


def run(
    stage: str, state: TrainState, loss, warmup: int, decay: int | None, options: Options, **settings
) -> TrainState:
    """Resume a stage where its checkpoint is, train to the end, and leave with status 130 when stopped before."""
    steps, path = options.steps or STAGES[stage].steps, options.checkpoint(stage)
    if path.exists():
        load_checkpoint(path, state)
        typer.echo(f"{stage}: goes on from step {state.step} of {steps}", err=True)
    with stop_on_signal() as stop:
        train(
            state,
            loss,
            steps,
            lambda step: learning_rate(step, steps, min(warmup, steps // 4), decay),
            checkpoint=path,
            every=options.every,
            stop=stop,
            progress=options.progress,
            **settings,
        )
    if state.step < steps:
        typer.echo(f"{stage}: stopped at step {state.step}, saved to {path}; the same command goes on", err=True)
        raise typer.Exit(130)
    typer.echo(
        f"{stage}: {state.step} steps, loss {state.loss:.4f}, {state.seconds / 3600:.2f} hours; {path}", err=True
    )
    return state


def shipped(stage: str) -> dict[str, Tensor]:
    """The shipped weights of a stage's part, in fp32."""
    return {name: value.float() for name, value in load_file(SHIPPED_MODEL / WEIGHTS[STAGES[stage].part]).items()}


def trained(stage: str, model: nn.Module, options: Options) -> nn.Module:
    """``model`` with the averaged weights of a stage's checkpoint, or else with the shipped ones if that was asked for."""
    path = options.checkpoint(stage)
    if stage == "vae" and options.checkpoint("decoder").exists():
        path = options.checkpoint("decoder")
    if path.exists():
        weights = torch.load(path, weights_only=True)["ema"]["shadow"]
        own = {name.removeprefix("encoder."): value for name, value in weights.items() if name.startswith("encoder.")}
        model.load_state_dict(own if stage == "text" else weights)
        return (calibrate(model, emoji()[0]) if stage == "vae" else model).eval()
    if not options.from_assets:
        raise typer.BadParameter(
            f"{path} is missing; run `python -m recipes.train {stage}` first, or add --from-assets"
        )
    model.load_state_dict(shipped(stage))
    return model.eval()


def as_shipped(model: nn.Module) -> nn.Module:
    """Weights rounded to fp16 and back: later stages train on what will be in the package."""
    return model.half().float().requires_grad_(False)


# --- stage 1: the VAE ----------------------------------------------------------------------------------------------------


def train_vae(options: Options) -> TrainState:
    """Chapter 09's loss on random batches; channels_last is twice as fast on a CPU."""
    torch.manual_seed(options.seed)
    model = VAE()
    if options.from_assets:
        model.load_state_dict(shipped("vae"))
    return fit_vae("vae", model, adamw(model.parameters(), 2e-3), 0.995, 150, options)


def train_decoder(options: Options) -> TrainState:
    """Chapter 09's loss again, but the encoder is frozen: the latents stay, and with them whatever was trained on them."""
    model = VAE()
    model.load_state_dict(trained("vae", VAE(), options).state_dict())
    model.encoder.requires_grad_(False)
    return fit_vae("decoder", model, adamw(model.decoder.parameters(), 6e-4), 0.98, 30, options)


def fit_vae(
    stage: str, model: VAE, optimizer: torch.optim.Optimizer, ema: float, warmup: int, options: Options
) -> TrainState:
    """Run a stage with `vae_loss` on random batches; its curve says the PSNR of every seventh picture."""
    pictures, _ = emoji()
    model = model.to(memory_format=torch.channels_last)
    batch = options.batch or STAGES[stage].batch

    def loss(generator: Generator) -> Tensor:
        images = pictures[torch.randint(len(pictures), (batch,), generator=generator)]
        noise = torch.randn(batch, model.config.latent_channels, 16, 16, generator=generator)
        return vae_loss(model, images.contiguous(memory_format=torch.channels_last), noise)

    @torch.no_grad()
    def measure(state: TrainState) -> dict[str, float]:
        averaged, sample = state.ema.copy_to(VAE()), pictures[::7]
        return {"psnr": round(psnr(averaged.decode(averaged.encode(sample)), sample).mean().item(), 3)}

    state = TrainState(model, optimizer, EMA(model, ema), options.seed)
    return run(stage, state, loss, warmup, None, options, measure=measure)


# --- stage 2: the text encoder -------------------------------------------------------------------------------------------


def get_tokenizer(options: Options) -> PromptTokenizer:
    """The tokenizer in the folder; where there is none, the shipped one (``from_assets``), or one learned from the captions."""
    path = options.folder / "text" / "tokenizer.json"
    if not path.exists():
        if options.from_assets:
            data = (SHIPPED_MODEL / "tokenizer.json").read_bytes()
        else:
            tags = [tag for record in emoji()[1] for tag in record.tags_en + record.tags_zh]
            data = train_tokenizer(labels("en") * 2 + labels("zh") * 2 + tags, VOCABULARY).to_str().encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_files({path: data})
    return PromptTokenizer(Tokenizer.from_str(path.read_text(encoding="utf-8")))


def new_text_encoder(tokenizer: PromptTokenizer) -> TextEncoder:
    return TextEncoder(TextEncoderConfig(vocab_size=tokenizer.vocab_size, max_length=tokenizer.max_length))


def random_caption(record: EmojiRecord, generator: Generator) -> str:
    """Either language: a label three times in four, one to three tags one time in five, nothing now and then."""
    which, kind, share = torch.rand(3, generator=generator).tolist()
    language = "zh" if which < 0.5 else "en"
    if kind < 0.03:
        return ""
    return some_tags(record, language, share, generator) if kind < 0.25 else getattr(record, f"label_{language}")


def train_text(options: Options) -> TrainState:
    """Pooled vector → one linear layer → the picture at half size, normalised; mean squared error."""
    pictures, records = emoji()
    target = F.avg_pool2d(pictures, 2).flatten(1)  # (N, 3072)
    target = (target - target.mean(dim=0)) / target.std()
    tokenizer = get_tokenizer(options)
    torch.manual_seed(options.seed)
    encoder = new_text_encoder(tokenizer)
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(encoder.config.width, target.shape[1])})
    if options.from_assets:
        encoder.load_state_dict(shipped("text"))
    batch = options.batch or STAGES["text"].batch

    def loss(generator: Generator) -> Tensor:
        rows = torch.randint(len(records), (batch,), generator=generator)
        tokens = tokenizer([random_caption(records[row], generator) for row in rows.tolist()])
        return F.mse_loss(model["head"](encoder(tokens.ids, tokens.mask).pooled), target[rows])

    @torch.no_grad()
    def measure(state: TrainState) -> dict[str, float]:
        same, found = same_pictures(), {}
        for language in LANGUAGES:
            tokens = tokenizer(labels(language)[::8])
            nearest = torch.cdist(model["head"](encoder(tokens.ids, tokens.mask).pooled), target).argmin(dim=1)
            found[language] = round((same[nearest] == same[::8]).float().mean().item(), 3)
        return found

    optimizer = muon_and_adamw(model, 2e-3, adamw_decay=0.01, muon_decay=0.0)
    state = TrainState(model, optimizer, EMA(model, 0.0), options.seed)  # decay 0: the weights themselves
    return run("text", state, loss, 50, None, options, measure=measure, clip=math.inf)


# --- stage 3: the DiT ----------------------------------------------------------------------------------------------------


class Captions:
    """Every caption's embedding, computed once: two labels and six choices of tags a picture, and the empty prompt.

    Caption c of picture i is row c · N + i; rows 0…2N − 1 are the labels, the last row is the empty prompt.
    """

    TAG_SETS, TAG_SHARE, BUCKET = 6, 0.13, 4

    def __init__(self, encoder: TextEncoder, tokenizer: PromptTokenizer):
        records, generator = emoji()[1], Generator().manual_seed(1)
        texts = labels("en") + labels("zh")
        for choice in range(self.TAG_SETS):
            shares = torch.rand(len(records), generator=generator).tolist()
            language = LANGUAGES[choice % 2]
            texts += [some_tags(r, language, share, generator) for r, share in zip(records, shares)]
        self.count, self.embeds = len(records), self.embed([*texts, ""], encoder, tokenizer)
        self.lengths = self.embeds.mask.sum(dim=1)

    @staticmethod
    @torch.no_grad()
    def embed(texts: list[str], encoder: TextEncoder, tokenizer: PromptTokenizer) -> PromptEmbeds:
        """All texts padded to the window; tokens in half precision, to fit into memory."""
        parts = []
        for start in range(0, len(texts), 256):
            tokens = tokenizer(texts[start : start + 256])
            embeds, extra = encoder(tokens.ids, tokens.mask), tokenizer.max_length - tokens.mask.shape[1]
            padded = F.pad(embeds.tokens, (0, 0, 0, extra)).half(), F.pad(embeds.mask, (0, extra)), embeds.pooled
            parts.append(padded)
        return PromptEmbeds(*(torch.cat(column) for column in zip(*parts)))

    def __getitem__(self, rows: Tensor) -> PromptEmbeds:
        """The rows' embeddings, cut to the longest of them."""
        length = int(self.lengths[rows].max())
        tokens, mask, pooled = (part[rows] for part in self.embeds)
        return PromptEmbeds(tokens[:, :length].float(), mask[:, :length], pooled)

    @property
    def empty(self) -> PromptEmbeds:
        return self[torch.tensor([len(self.lengths) - 1])]

    def batch(self, size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Pictures and captions (rows) of one step; four steps share a draw that is sorted by length, so little is padded."""
        group, place = divmod(step, self.BUCKET)
        generator = step_generator(seed + 1, group)
        pictures = torch.randint(self.count, (self.BUCKET * size,), generator=generator)
        label = torch.randint(len(LANGUAGES), pictures.shape, generator=generator)
        tags = len(LANGUAGES) + torch.randint(self.TAG_SETS, pictures.shape, generator=generator)
        chosen = torch.where(torch.rand(pictures.shape, generator=generator) < self.TAG_SHARE, tags, label)
        captions = pictures + self.count * chosen
        order = torch.randperm(self.BUCKET, generator=generator)
        rows = self.lengths[captions].argsort(stable=True).view(self.BUCKET, size)[order[place]]
        return pictures[rows], captions[rows]


def train_dit(options: Options) -> TrainState:
    """Chapter 11's loss on cached latents and cached prompt embeddings."""
    vae = as_shipped(trained("vae", VAE(), options))
    tokenizer = get_tokenizer(options)
    captions = Captions(as_shipped(trained("text", new_text_encoder(tokenizer), options)), tokenizer)
    latents = torch.cat([vae.encode(part) for part in emoji()[0].split(64)])  # (N, 4, 16, 16)
    torch.manual_seed(options.seed)
    model = DiT()
    if options.from_assets:
        model.load_state_dict(shipped("dit"))
    batch, empty = options.batch or STAGES["dit"].batch, captions.empty

    def loss(generator: Generator) -> Tensor:
        pictures, rows = captions.batch(batch, options.seed, state.step)
        prompts = drop_condition(captions[rows], empty, 0.1, generator)
        return flow_matching_loss(lambda x, t, p: model(x, t, *p), latents[pictures], prompts, generator, mean=0.4)

    def measure(state: TrainState) -> dict[str, float]:
        return retrieval(state.ema.copy_to(DiT()), captions, latents)

    optimizer = muon_and_adamw(model, 1.5e-3, adamw_decay=0.0, muon_decay=0.01, without="modulation")
    state = TrainState(model, optimizer, EMA(model, 0.998), options.seed)
    steps = options.steps or STAGES["dit"].steps
    return run("dit", state, loss, 100, steps // 2, options, measure=measure)


@torch.no_grad()
def retrieval(model: DiT, captions: Captions, latents: Tensor, count: int = 96, steps: int = 12) -> dict[str, float]:
    """Share of ``count`` labels whose drawing (guidance 3, one noise a picture) lies nearest to its own picture."""
    same, found, count = same_pictures(), {}, min(count, captions.count)
    chosen = torch.arange(0, captions.count, captions.count // count)[:count]
    noise = torch.randn(count, *latents.shape[1:], generator=Generator().manual_seed(0))
    empty = PromptEmbeds(*(part.expand(count, *part.shape[1:]) for part in captions.empty))
    for number, language in enumerate(LANGUAGES):
        velocity = guided_velocity(
            lambda x, t, p: model(x, t, *p), captions[chosen + number * captions.count], empty, 3.0
        )
        drawn = integrate(velocity, noise, [1 - i / steps for i in range(steps + 1)])
        nearest = torch.cdist(drawn.flatten(1), latents.flatten(1)).argmin(dim=1)
        found[language] = round((same[nearest] == same[chosen]).float().mean().item(), 3)
    return found


# --- export --------------------------------------------------------------------------------------------------------------


def training_log(options: Options, output: Path) -> dict:
    """What the model card reads: each stage's seed, steps, hours and curve; what was tried stays as it was written."""
    old = (
        json.loads((output / "training.json").read_text(encoding="utf-8"))
        if (output / "training.json").exists()
        else {}
    )
    parts = {part["name"]: part for part in old.get("parts", [])}
    for name, stage in STAGES.items():
        if options.checkpoint(name).exists():
            parts[name] = log_entry(name, stage, options)
    return {"parts": [parts[name] for name in STAGES if name in parts], "tried": old.get("tried", [])}


def log_entry(name: str, stage: Stage, options: Options) -> dict:
    """One stage's entry, from its checkpoint."""
    found = torch.load(options.checkpoint(name), weights_only=True)
    weights = [n for n in found["model"] if not n.startswith("head.")]
    return {
        "name": name,
        "what": stage.what,
        "seed": found["seed"],
        "steps": found["step"],
        "batch": options.batch or stage.batch,
        "hours": round(found["seconds"] / 3600, 3),
        "parameters": sum(found["model"][n].numel() for n in weights),
        "curve": [[entry["step"], entry["loss"]] for entry in found["curve"]],
    }


def export_model(options: Options, output: Path, recommended: dict) -> dict:
    """Averaged weights in fp16, tokenizer, configuration with hashes, training log; each file whole or not at all."""
    tokenizer = get_tokenizer(options)
    config = save_model(
        output,
        vae=trained("vae", VAE(), options),
        text_encoder=trained("text", new_text_encoder(tokenizer), options),
        dit=trained("dit", DiT(), options),
        tokenizer=tokenizer.tokenizer.to_str(),
        recommended=recommended,
    )
    log = json.dumps(training_log(options, output), ensure_ascii=False, indent=1) + "\n"
    write_files({output / "training.json": log.encode()})
    return config


# --- command line --------------------------------------------------------------------------------------------------------

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
RUN = {"vae": train_vae, "decoder": train_decoder, "text": train_text, "dit": train_dit}

Folder = Annotated[Path, typer.Option(help="checkpoints and curves")]
FromAssets = Annotated[bool, typer.Option("--from-assets", help="shipped weights where a stage has no checkpoint")]
Threads = Annotated[int, typer.Option(min=1, help="part of what decides the bits")]
Seed = Annotated[int, typer.Option(min=0)]
Steps = Annotated[
    int | None, typer.Option(min=1, help="of the whole run, with what was done before; the recipe's by default")
]
Batch = Annotated[int | None, typer.Option(min=1, help="the recipe's by default")]
Every = Annotated[int, typer.Option(min=1, help="steps between checkpoints")]


def stage_command(names: tuple[str, ...]) -> Callable:
    def command(
        folder: Folder = FOLDER,
        steps: Steps = None,
        batch: Batch = None,
        seed: Seed = 0,
        threads: Threads = 2,
        every: Every = 200,
        from_assets: FromAssets = False,
    ) -> None:
        torch.set_num_threads(threads)
        for name in names:
            RUN[name](Options(folder, steps, batch, seed, from_assets, every))

    return command


for _name, _train in RUN.items():
    app.command(_name, help=_train.__doc__)(stage_command((_name,)))
app.command("all", help="All stages, one after the other.")(stage_command(tuple(RUN)))


@app.command()
def export(
    folder: Folder = FOLDER,
    output: Annotated[Path, typer.Option(help="the model folder to write")] = SHIPPED_MODEL,
    guidance: Annotated[float, typer.Option(min=0, help="recommended guidance scale")] = 4.0,
    shift: Annotated[float, typer.Option(min=0.01, help="recommended shift of the schedule")] = 1.0,
    inference_steps: Annotated[int, typer.Option(min=1, help="recommended number of steps")] = 28,
    from_assets: FromAssets = False,
) -> None:
    """Write the model folder from the checkpoints, also from those of an unfinished run."""
    recommended = {"guidance_scale": guidance, "num_inference_steps": inference_steps, "shift": shift}
    recommended |= {"height": 64, "width": 64}
    config = export_model(Options(folder, from_assets=from_assets), output, recommended)
    for name, digest in config["sha256"].items():
        typer.echo(f"{output / name}: {(output / name).stat().st_size:,} bytes, sha256 {digest[:16]}…")


if __name__ == "__main__":
    app()
