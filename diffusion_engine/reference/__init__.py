"""Real model families on the course's parts: read their checkpoints, run them, or put them into diffusers' pipelines.

    from diffusion_engine import reference

    model = reference.from_pretrained("path/to/stable-diffusion-3.5-medium")   # velocity = model(latents, t, text, …)
    pipe.transformer = reference.drop_in("path/to/stable-diffusion-3.5-medium")

Nothing here imports diffusers, and nothing is fetched unless ``download=True`` asks for it.
"""

from importlib import import_module

# The class that a checkpoint's config.json names → our module and class.
FAMILIES = {
    "SD3Transformer2DModel": ("sd3", "SD3"),
    "FluxTransformer2DModel": ("flux", "Flux"),
    "SanaTransformer2DModel": ("sana", "Sana"),
    "WanTransformer3DModel": ("wan", "Wan"),
    "LTXVideoTransformer3DModel": ("ltx", "LTX"),
    "CogVideoXTransformer3DModel": ("cogvideox", "CogVideoX"),
    "HunyuanVideoTransformer3DModel": ("hunyuan_video", "HunyuanVideo"),
}


def from_pretrained(model, subfolder: str = "transformer", device="cpu", dtype=None, download: bool = False):
    """The transformer of a folder or a hub id, of the family that its ``config.json`` names.

    Args:
        model: a folder as diffusers' ``save_pretrained`` writes it, or ``owner/name`` on the hub, from the local cache.
        subfolder: where the transformer lies in it; a folder that holds ``config.json`` itself is taken as it is.
        device: where the weights go. dtype: a torch dtype, or None for the one in the files.
        download: fetch a hub id that is not in the cache.

    Raises:
        ValueError: not found, damaged, not fitting, or of another family; the message names what.
    """
    checkpoint = import_module(f"{__name__}.checkpoint")
    folder = checkpoint.find_folder(model, subfolder, download)
    found = checkpoint.read_json(folder / "config.json").get("_class_name")
    if found not in FAMILIES:
        raise ValueError(f"{folder / 'config.json'} names {found!r}; the families here are {', '.join(FAMILIES)}")
    module, name = FAMILIES[found]
    kind = getattr(import_module(f"{__name__}.{module}"), name)
    return checkpoint.load(kind, folder, device, dtype)


def drop_in(model, subfolder: str = "transformer", device="cpu", dtype=None, download: bool = False):
    """`from_pretrained`'s model behind diffusers' call: ``pipe.transformer = drop_in(folder)``."""
    return import_module(f"{__name__}.checkpoint").DropIn(from_pretrained(model, subfolder, device, dtype, download))
