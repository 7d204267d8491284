"""Where the shipped text model lies: a Hugging Face folder that completes and translates emoji captions."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
