"""``python -m minivllm "red"``: several texts at once, continued by the small model that ships inside or by another."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from minivllm.shipped import ASSETS

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    prompts: Annotated[
        list[str], typer.Argument(help="Beginnings of texts, in English or Chinese.", show_default=False)
    ],
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Continuations of each; i draws with seed + i.")
    ] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of each.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token, always.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the most likely tokens with this probability together.")] = 0.95,
    seed: Annotated[int, typer.Option()] = 0,
    model: Annotated[Path, typer.Option(help="A folder with a Qwen3: config, safetensors, tokenizer.json.")] = ASSETS,
) -> None:
    """Continue texts: all of them together, in one loop over one pool of blocks."""
    from tokenizers import Tokenizer

    from minivllm.kv_cache import Sampling
    from minivllm.paged_kv import Engine, Progress, run
    from minivllm.qwen3 import Qwen3

    try:
        samplings = [Sampling(temperature, top_k, top_p, seed + i) for i in range(count if temperature else 1)]
        if not (model / "tokenizer.json").is_file():
            raise ValueError(f"{model} holds no tokenizer.json")
        network, tokenizer = Qwen3.from_pretrained(model), Tokenizer.from_file(str(model / "tokenizer.json"))
        engine = Engine(network, num_blocks=256)
        asked = [
            (prompt, engine.add(tokenizer.encode(prompt).ids, tokens, sampling))
            for prompt in prompts
            for sampling in samplings
        ]
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None

    with tqdm(total=len(asked), unit="text", disable=not sys.stderr.isatty(), leave=False) as bar:

        def show(now: Progress) -> None:
            bar.set_postfix(
                running=now.running, waiting=now.waiting, tokens=now.tokens, free=now.free_blocks, refresh=False
            )
            bar.update(now.finished - bar.n)

        run(engine, show)
    for prompt, request in asked:
        print(prompt + tokenizer.decode(request.output))


if __name__ == "__main__":
    app(prog_name="python -m minivllm")
