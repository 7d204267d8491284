"""The small text model that ships with the old engine: it completes emoji captions and translates them.

    python -m recipes.train_minivllm train     # about a quarter of an hour on one core; Ctrl-C saves, the same command goes on
    python -m recipes.train_minivllm export    # config.json, fp16 weights and tokenizer.json into minivllm/assets

Its texts are the captions of the emoji data, each as ``red apple = 红苹果`` and the other way round, and nothing else. The
folder is one that ``transformers`` reads too. Seeded: the same machine, threads and options give the same weights.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Generator, Tensor, nn

from diffusion_engine.files import write_files
from diffusion_engine.training import EMA, TrainState, learning_rate, load_checkpoint, train
from minivllm.qwen3 import FUSED, Qwen3, Qwen3Config
from minivllm.shipped import ASSETS
from recipes.emoji_data import EmojiRecord, load_emoji
from recipes.train import adamw, stop_on_signal

FOLDER = Path.home() / ".cache" / "diffusion_engine" / "minivllm"
END = "<|endoftext|>"  # id 0: before every text and after it
STEPS, BATCH, RATE, WARMUP = 2700, 64, 3e-3, 100


def new_model(vocab_size: int) -> Qwen3:
    """Four layers of width 128 with random weights of deviation 0.02 · sqrt(1024 / 128), Qwen3-0.6B's scaled to the width."""
    config = Qwen3Config(vocab_size, 128, 384, 4, 4, 2, 32, 256, 1e-6, 10_000.0, True, (0,))
    model = Qwen3(config)
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.06)
    return model


def sentences(records: list[EmojiRecord]) -> list[str]:
    """Both directions of every caption: ``red apple = 红苹果``, ``红苹果 = red apple``."""
    pairs = [(record.label_en, record.label_zh) for record in records]
    return [f"{a} = {b}" for en, zh in pairs for a, b in ((en, zh), (zh, en))]


def learn_tokenizer(texts: list[str], vocab_size: int = 2560) -> Tokenizer:
    """Byte-level byte-pair encoding, as Qwen's: every text can be written, nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def rows_of(tokenizer: Tokenizer, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (R, N) of all texts; targets after the end are −100, which no loss counts."""
    encoded = [[*tokenizer.encode(text).ids, 0] for text in texts]
    rows = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in encoded], batch_first=True, padding_value=-100)
    return rows[:, :-1].clamp_min(0), rows[:, 1:]


def caption_loss(model: Qwen3, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, over real tokens."""
    longest = int((targets >= 0).sum(dim=1).max())
    logits = model(inputs[:, :longest])
    return F.cross_entropy(logits.flatten(0, 1), targets[:, :longest].flatten(), ignore_index=-100)


def hub_names(model: Qwen3) -> dict[str, Tensor]:
    """The weights under Hugging Face's names, the inverse of `minivllm.qwen3.fuse`, without the tied head."""
    c = model.config
    heads, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    sizes = {"qkv_proj": [heads, keys, keys], "gate_up_proj": [c.intermediate_size] * 2}
    weights = {
        name: w for name, w in model.state_dict().items() if name != "lm_head.weight" or not c.tie_word_embeddings
    }
    for fused, parts in FUSED.items():
        for name in [name for name in weights if fused in name]:
            pieces = weights.pop(name).split(sizes[fused])
            weights |= {name.replace(fused, part): piece.contiguous() for part, piece in zip(parts, pieces)}
    return {name if name.startswith("lm_head") else f"model.{name}": weight for name, weight in weights.items()}


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Folder = Annotated[Path, typer.Option(help="checkpoint and curve")]


def begin(seed: int) -> tuple[TrainState, Tokenizer, list[str]]:
    """A fresh state, the tokenizer and the texts."""
    texts = sentences(load_emoji().records)
    tokenizer = learn_tokenizer(texts)
    torch.manual_seed(seed)
    model = new_model(tokenizer.get_vocab_size())
    optimizer = adamw(model.parameters(), RATE, weight_decay=0.05)
    return TrainState(model, optimizer, EMA(model, 0.995), seed), tokenizer, texts


@app.command("train")
def train_captions(
    folder: Folder = FOLDER,
    steps: Annotated[int, typer.Option(min=1)] = STEPS,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Train, or go on; an interrupted run ends in the same weights as one that was never stopped."""
    torch.set_num_threads(threads)
    state, tokenizer, texts = begin(seed)
    inputs, targets = rows_of(tokenizer, texts)
    path = folder / "checkpoint.pt"
    if path.exists():
        load_checkpoint(path, state)

    def loss(generator: Generator) -> Tensor:
        rows = torch.randint(len(inputs), (BATCH,), generator=generator)
        return caption_loss(state.model, inputs[rows], targets[rows])

    with stop_on_signal() as stop:
        rate = lambda step: learning_rate(step, steps, min(WARMUP, steps // 4), cosine=True)  # noqa: E731
        train(state, loss, steps, rate, checkpoint=path, every=500, stop=stop)
    typer.echo(
        f"step {state.step} of {steps}, loss {state.loss:.3f}, {state.seconds / 60:.1f} minutes; {path}", err=True
    )


@app.command()
def export(folder: Folder = FOLDER, output: Annotated[Path, typer.Option()] = ASSETS, seed: int = 0) -> None:
    """Write the averaged weights of the checkpoint as a folder that minivllm and transformers read."""
    state, tokenizer, _ = begin(seed)
    load_checkpoint(folder / "checkpoint.pt", state)
    model = state.ema.copy_to(state.model)
    data = save({name: weight.half() for name, weight in hub_names(model).items()}, metadata={"format": "pt"})
    sizes = {name: value for name, value in asdict(model.config).items() if name not in ("rope_theta", "eos_token_id")}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes,
        "rope_theta": model.config.rope_theta,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float16",
        "training": {"steps": state.step, "loss": round(state.loss, 4), "seed": seed},
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    write_files(
        {
            output / "model.safetensors": data,
            output / "config.json": text.encode(),
            output / "tokenizer.json": tokenizer.to_str().encode(),
        }
    )
    typer.echo(f"{output}: {sum(p.stat().st_size for p in output.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    app()
