"""The shipped text → clip model, trained in stages on the clip data, with chapter 14's module.

    python -m recipes.train_clip vae         # 1: clips to video latents and back
    python -m recipes.train_clip decoder     # after 1, at any time: the decoder alone, the latents stay as they are
    python -m recipes.train_clip text        # 2: the refiner, over the shipped picture model's frozen text encoder
    python -m recipes.train_clip dit         # 3: the velocity field, over what 1 and 2 give
    python -m recipes.train_clip factorised  # for comparison: the first steps of 3 with factorised attention
    python -m recipes.train_clip export      # fp16 weights, configuration and hashes into the package

Seeded, resumable and stopped like `recipes.train`, whose optimizers, runner and command line serve here, too.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Generator, Tensor, nn

from diffusion_engine.files import write_files
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.model_folder import SHIPPED_CLIP_MODEL, SHIPPED_MODEL, load_model, save_clip_model
from diffusion_engine.rectified_flow import integrate
from diffusion_engine.text_conditioning import PromptEmbeds
from diffusion_engine.training import EMA, TrainState, drop_condition, flow_matching_loss
from diffusion_engine.vae import psnr
from diffusion_engine.video import TextRefiner, VideoDiT, VideoDiTConfig, VideoVAE, latent_frames
from recipes.clip_data import FRAMES, SIZE, as_floats, caption, clip_data
from recipes.train import (
    FOLDER,
    LANGUAGES,
    Batch,
    Captions,
    Every,
    Folder,
    Options,
    Seed,
    Stage,
    Steps,
    Threads,
    adamw,
    as_shipped,
    log_entry,
    muon_and_adamw,
    run,
)

STAGES = {
    "clip_vae": Stage(
        "vae",
        2250,
        8,
        {
            "en": "clips to latents and back: L1 + 8·MSE + ¼·gradient L1 + 5·10⁻⁴·KL; whole clips and five-frame pieces; AdamW",
            "zh": "短片与潜变量互译：L1 + 8·MSE + ¼·梯度 L1 + 5·10⁻⁴·KL；整段与五帧的片段；AdamW",
        },
    ),
    "clip_decoder": Stage(
        "vae",
        2700,
        8,
        {
            "en": "the decoder alone, encoder and latents untouched: the same loss without noise in the latents",
            "zh": "只训练解码器，编码器与潜变量不动：同样的损失，潜变量不加噪声",
        },
    ),
    "clip_text": Stage(
        "refiner",
        600,
        128,
        {
            "en": "captions to a tiny clip through one linear head (MSE), then frozen, over the picture model's frozen text "
            "encoder; Muon and AdamW",
            "zh": "从说明文字经一个线性层猜一段极小的短片（MSE），之后冻结；下面是图像模型冻结的文本编码器；Muon 与 AdamW",
        },
    ),
    "clip_dit": Stage(
        "dit",
        1400,
        128,
        {
            "en": "the velocity field: logit-normal σ with mean 0.4, 10 % empty prompts; Muon and AdamW, EMA 0.998",
            "zh": "速度场：logit-normal σ，均值 0.4，一成空提示词；Muon 与 AdamW，EMA 0.998",
        },
    ),
    "clip_dit_factorised": Stage(
        "dit",
        200,
        128,
        {
            "en": "for comparison, not shipped: the same with factorised attention, over the first steps alone",
            "zh": "用来比较，不随包发布：同样的网络换成分解注意力，只走开头几步",
        },
    ),
}


def filled(stage: str, options: Options) -> Options:
    """The options with the stage's own steps and batch where none were asked for."""
    own = STAGES[stage]
    return replace(options, steps=options.steps or own.steps, batch=options.batch or own.batch)


def averaged(stage: str, model: nn.Module, options: Options) -> nn.Module:
    """``model`` with the averaged weights of a stage's checkpoint."""
    path = options.checkpoint(stage)
    if not path.exists():
        command = stage.removeprefix("clip_")
        raise typer.BadParameter(f"{path} is missing; run `python -m recipes.train_clip {command}` first")
    weights = torch.load(path, weights_only=True)["ema"]["shadow"]
    model.load_state_dict({n.removeprefix("refiner."): v for n, v in weights.items() if not n.startswith("head.")})
    return model.eval()


# --- stage 1: the VAE ----------------------------------------------------------------------------------------------------


def train_vae(options: Options) -> TrainState:
    """Whole clips one step in three; else five frames of three times as many clips, which show more emoji a second."""
    torch.manual_seed(options.seed)
    model = VideoVAE()
    return fit_vae("clip_vae", model, adamw(model.parameters(), 2e-3), 0.995, 150, options)


def train_decoder(options: Options) -> TrainState:
    """The same loss again, but the encoder is frozen: the latents stay, and with them whatever was trained on them."""
    model = averaged("clip_vae", VideoVAE(), options)
    model.encoder.requires_grad_(False)
    return fit_vae("clip_decoder", model, adamw(model.decoder.parameters(), 1e-3), 0.99, 30, options, noise=0.0)


def fit_vae(
    stage: str, model: VideoVAE, optimizer, ema: float, warmup: int, options: Options, noise: float = 1.0
) -> TrainState:
    """Run a stage with `clip_loss` on random clips; its curve says the PSNR of every 37th clip.

    Args:
        noise: share of the posterior's noise that the decoder meets; 0 takes the mean, as `VideoVAE.encode` does.
    """
    options, (clips, _) = filled(stage, options), clip_data()

    def loss(generator: Generator) -> Tensor:
        whole = torch.rand((), generator=generator) < 1 / 3  # else three times as many clips of five frames
        count, frames = (options.batch, FRAMES) if whole else (3 * options.batch, 5)
        rows = torch.randint(len(clips), (count,), generator=generator)
        first = int(torch.randint(FRAMES - frames + 1, (), generator=generator))
        batch = as_floats(clips[rows, :, first : first + frames])
        shape = count, model.config.latent_channels, latent_frames(frames), 8, 8
        return clip_loss(model, batch, noise * torch.randn(shape, generator=generator))

    @torch.no_grad()
    def measure(state: TrainState) -> dict[str, float]:
        vae, sample = state.ema.copy_to(VideoVAE()), as_floats(clips[::37])
        return {"psnr": round(psnr(vae.decode(vae.encode(sample)), sample).mean().item(), 3)}

    state = TrainState(model, optimizer, EMA(model, ema), options.seed)
    return run(stage, state, loss, warmup, None, options, measure=measure)


def clip_loss(vae: VideoVAE, clips: Tensor, noise: Tensor) -> Tensor:
    """L1 + 8 · MSE + ¼ · L1 of the differences between neighbours (down, across) + 5·10⁻⁴ · KL; every term a mean."""
    posterior = vae.posterior(clips)
    error = vae.decoder(posterior.sample(noise)) - clips
    lines = error.diff(dim=-2).abs().mean() + error.diff(dim=-1).abs().mean()
    return error.abs().mean() + 8 * error.square().mean() + 0.25 * lines + 5e-4 * posterior.kl()


@torch.no_grad()
def calibrated(vae: VideoVAE, clips: Tensor) -> VideoVAE:
    """Set ``shift`` and ``scale`` to mean and standard deviation of each latent channel over all clips."""
    latents = torch.cat([vae.posterior(as_floats(part)).mean for part in clips.split(64)])  # (N, C, 5, 8, 8)
    vae.shift.copy_(latents.mean(dim=(0, 2, 3, 4)))
    vae.scale.copy_(latents.std(dim=(0, 2, 3, 4)))
    return vae


def trained_vae(options: Options) -> VideoVAE:
    """The VAE as it ships: the polished decoder where there is one, latents of unit variance, weights that fp16 holds."""
    stage = "clip_decoder" if options.checkpoint("clip_decoder").exists() else "clip_vae"
    return as_shipped(calibrated(averaged(stage, VideoVAE(), options), clip_data()[0]))


# --- stage 2: the refiner of the text ------------------------------------------------------------------------------------


class ClipCaptions(Captions):
    """Every caption of every clip, embedded once: two languages × two forms, then the bare labels, then the empty prompt.

    Form f in language l of clip i is row (2 l + f) · N + i. `Captions` brings the embedding and the cutting.
    """

    def __init__(self, encoder, tokenizer, refiner: TextRefiner | None = None):
        clips = clip_data()[1]
        self.count = len(clips)
        texts = [caption(clip, language, form) for language in LANGUAGES for form in (0, 1) for clip in clips]
        bare = [getattr(clip.record, f"label_{language}") for language in LANGUAGES for clip in clips]
        embeds = self.embed([*texts, *bare, ""], encoder, tokenizer)
        if refiner is not None:
            parts = zip(*(part.split(512) for part in embeds))
            with torch.no_grad():
                done = [refiner(PromptEmbeds(t.float(), m, p)) for t, m, p in parts]
            embeds = PromptEmbeds(*(torch.cat(column) for column in zip(*done)))
            embeds = embeds._replace(tokens=embeds.tokens.half())
        self.embeds, self.lengths = embeds, embeds.mask.sum(dim=1)

    def batch(self, size: int, generator: Generator, bare: float = 0.04) -> tuple[Tensor, Tensor]:
        """Clips and captions (rows): the comma form three times in four, a bare label now and then (any of its motions)."""
        rows = torch.randint(self.count, (size,), generator=generator)
        kind, language = torch.rand(size, generator=generator), torch.randint(2, (size,), generator=generator)
        block = torch.where(kind < bare, 4 + language, 2 * language + (kind > 0.75 + bare / 4))
        return rows, rows + self.count * block


@cache
def text_parts():
    """The shipped text encoder and its tokenizer."""
    model = load_model(SHIPPED_MODEL, "cpu", "float32")
    return model.text_encoder, model.tokenizer


def train_text(options: Options) -> TrainState:
    """Frozen token outputs → refiner → its first token → one linear layer → the clip, 8×8 pixels, every fourth frame."""
    options, (clips, _) = filled("clip_text", options), clip_data()
    tiny = torch.cat([F.avg_pool3d(as_floats(p)[:, :, ::4], (1, 4, 4)) for p in clips.split(256)]).flatten(1)
    tiny = (tiny - tiny.mean(dim=0)) / tiny.std()  # (N, 960)
    captions = ClipCaptions(*text_parts())
    torch.manual_seed(options.seed)
    refiner = TextRefiner()
    model = nn.ModuleDict({"refiner": refiner, "head": nn.Linear(256, tiny.shape[1])})

    def loss(generator: Generator) -> Tensor:
        rows, prompts = captions.batch(options.batch, generator, bare=0)
        return F.mse_loss(model["head"](refiner(captions[prompts]).pooled), tiny[rows])

    @torch.no_grad()
    def measure(state: TrainState) -> dict[str, float]:
        found = {}
        for number, language in enumerate(LANGUAGES):
            sample = torch.arange(0, captions.count, 11)
            told = model["head"](refiner(captions[sample + 2 * number * captions.count]).pooled)
            hits = hit(torch.cdist(told, tiny).argmin(dim=1), sample)
            found |= {f"{name}_{language}": value for name, value in hits.items()}
        return found

    optimizer = muon_and_adamw(model, 2e-3, adamw_decay=0.01, muon_decay=0.0)
    state = TrainState(model, optimizer, EMA(model, 0.0), options.seed)
    return run("clip_text", state, loss, 50, None, options, measure=measure)


def hit(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Shares of right emoji and of right motions (the latter among the procedural clips wanted)."""
    told = clip_data()[1]
    pairs = [(told[f], told[w]) for f, w in zip(found.tolist(), wanted.tolist())]
    moved = [f.motion == w.motion for f, w in pairs if w.motion != "animated"]
    same = [f.record.same_as == w.record.same_as for f, w in pairs]
    return {"emoji": round(sum(same) / len(same), 3), "motion": round(sum(moved) / len(moved), 3)}


# --- stage 3: the DiT ----------------------------------------------------------------------------------------------------


def train_dit(options: Options, stage: str = "clip_dit") -> TrainState:
    """Chapter 11's loss on cached video latents and cached captions."""
    options, (clips, _) = filled(stage, options), clip_data()
    vae, config = trained_vae(options), VideoDiTConfig(factorised=stage == "clip_dit_factorised")
    captions = ClipCaptions(*text_parts(), as_shipped(averaged("clip_text", TextRefiner(), options)))
    with torch.no_grad():
        latents = torch.cat([vae.encode(as_floats(part)) for part in clips.split(64)])  # (N, 8, 5, 8, 8)
    torch.manual_seed(options.seed)
    model, empty = VideoDiT(config), captions.empty

    def loss(generator: Generator) -> Tensor:
        rows, texts = captions.batch(options.batch, generator)
        prompts = drop_condition(captions[texts], empty, 0.1, generator)
        return flow_matching_loss(lambda x, t, p: model(x, t, *p), latents[rows], prompts, generator, mean=0.4)

    def measure(state: TrainState) -> dict[str, float]:
        return retrieval(state.ema.copy_to(VideoDiT(config)), captions, latents)

    optimizer = muon_and_adamw(model, 1.5e-3, adamw_decay=0.0, muon_decay=0.01, without="modulation")
    state = TrainState(model, optimizer, EMA(model, 0.998), options.seed)
    return run(stage, state, loss, 100, 0 if config.factorised else options.steps // 2, options, measure=measure)


def train_factorised(options: Options) -> TrainState:
    """The first steps of `train_dit` again, at its rate, with attention along space and time in turns."""
    return train_dit(options, "clip_dit_factorised")


@torch.no_grad()
def retrieval(model: VideoDiT, captions: ClipCaptions, latents: Tensor, count: int = 64, steps: int = 10) -> dict:
    """Shares of right emoji and right motions of ``count`` clips drawn in each language, guidance 3, one noise for all."""
    found, sample = {}, torch.arange(0, captions.count, captions.count // count)[:count]
    noise = torch.randn(count, *latents.shape[1:], generator=Generator().manual_seed(0))
    empty = PromptEmbeds(*(part.expand(count, *part.shape[1:]) for part in captions.empty))
    for number, language in enumerate(LANGUAGES):
        condition = captions[sample + 2 * number * captions.count]
        velocity = guided_velocity(lambda x, t, p: model(x, t, *p), condition, empty, 3.0)
        drawn = integrate(velocity, noise, [1 - i / steps for i in range(steps + 1)])
        nearest = torch.cdist(drawn.flatten(1), latents.flatten(1)).argmin(dim=1)
        found |= {f"{name}_{language}": value for name, value in hit(nearest, sample).items()}
    return found


# --- export --------------------------------------------------------------------------------------------------------------


def training_log(options: Options, output: Path) -> dict:
    """What the model card and the chapter read: each stage's seed, steps, hours and curve; "tried" stays as written."""
    path = output / "training.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts = {part["name"]: part for part in old.get("parts", [])}
    for name, stage in STAGES.items():
        if options.checkpoint(name).exists():
            parts[name] = log_entry(name, stage, options)
    return {"parts": [parts[name] for name in STAGES if name in parts], "tried": old.get("tried", [])}


def export_model(options: Options, output: Path, best: dict) -> dict:
    """Averaged weights in fp16, configuration with hashes, training log; each file whole or not at all."""
    parts = {"vae": trained_vae(options), "dit": averaged("clip_dit", VideoDiT(), options)}
    parts["refiner"] = averaged("clip_text", TextRefiner(), options)
    config = save_clip_model(output, **parts, recommended=best)
    log = json.dumps(training_log(options, output), ensure_ascii=False, indent=1) + "\n"
    write_files({output / "training.json": log.encode()})
    return config


# --- command line --------------------------------------------------------------------------------------------------------

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
RUN = {"vae": train_vae, "decoder": train_decoder, "text": train_text, "dit": train_dit}
RUN |= {"factorised": train_factorised}


def stage_command(name: str):
    def command(
        folder: Folder = FOLDER,
        steps: Steps = None,
        batch: Batch = None,
        seed: Seed = 0,
        threads: Threads = 2,
        every: Every = 200,
    ) -> None:
        torch.set_num_threads(threads)
        RUN[name](Options(folder, steps, batch, seed, False, every))

    return command


for _name, _train in RUN.items():
    app.command(_name, help=_train.__doc__)(stage_command(_name))


@app.command()
def export(
    folder: Folder = FOLDER,
    output: Annotated[Path, typer.Option(help="the model folder to write")] = SHIPPED_CLIP_MODEL,
    guidance: Annotated[float, typer.Option(min=0, help="recommended guidance scale")] = 3.0,
    shift: Annotated[float, typer.Option(min=0.01, help="recommended shift of the schedule")] = 1.0,
    inference_steps: Annotated[int, typer.Option(min=1, help="recommended number of steps")] = 28,
) -> None:
    """Write the model folder from the checkpoints, also from those of an unfinished run."""
    best = {"guidance_scale": guidance, "num_inference_steps": inference_steps, "shift": shift}
    config = export_model(Options(folder), output, best | {"height": SIZE, "width": SIZE, "frames": FRAMES})
    for name, digest in config["sha256"].items():
        typer.echo(f"{output / name}: {(output / name).stat().st_size:,} bytes, sha256 {digest[:16]}…")


if __name__ == "__main__":
    app()
