"""A report of ``make bench`` with the keys of a real one and made-up numbers, for what reads it."""

THREE = [1.25, 1.0, 1.5]
MACHINE = {
    "processor": "A|B 9000",
    "threads": 2,
    "python": "3.11",
    "torch": "2.13",
    "engine": "0.1.0",
    "date": "2000-01-01",
}
MACHINE |= {"fp32_gflops": 50.0, "bf16_gflops": 1.0, "fp32_gemm_size": 2048, "bf16_gemm_size": 512}
MACHINE |= {"bandwidth_gbs": 10.0, "minutes": 1.0}
SHARES = {"matrix products": 0.8, "views, dispatch, Python": 0.2}
FORWARD = {"seconds": THREE, "gflop": 1.0, "share_of_gemm_rate": 0.5, "share_of_gemm_rate_products_alone": 0.75}
FORWARD |= {"time_outside_products": 0.25, "shares": SHARES}
PICTURE = {
    "seconds": THREE,
    "seconds_hoisted": THREE,
    "stages": dict.fromkeys(("encode", "noise", "denoise", "decode"), 0.5),
}
PICTURE |= {"gflop": 9.0, "gemm_seconds": 0.5, "over_gemm_time": THREE, "over_gemm_time_hoisted": THREE}
STACK = {"width": 256, "heads": 8, "depth": 4, "ours_s": THREE, "diffusers_s": THREE, "products_over_diffusers": THREE}
STACK |= {"ours_peak_bytes": 1, "diffusers_peak_bytes": 2, "max_abs_difference": 1e-6}
SWITCHES = ("prompt_cache", "latent_buffer", "batched_cfg", "attention_chunk", "vae_tile", "hoist", "guidance_interval")
FAMILIES = ("sd3", "flux", "sana", "wan", "ltx", "cogvideox", "hunyuan_video")
ATTENTION = {name: {"512": 1000, "1024": 2000, "2048": 4000} for name in ("naive", "chunks of 64", "fused")}


def bench() -> dict:
    """A new copy."""
    stacks = [
        {"dtype": dtype, "tokens": n, "time_ratio": [ratio, 0.5, 1.0], "peak_ratio": ratio, "upcast_ratio": None}
        | STACK
        for dtype, n, ratio in (("float32", 64, 0.7), ("float32", 256, 0.8), ("bfloat16", 64, 0.95))
    ]
    caches = [
        {
            "forecast": forecast,
            "threshold": t,
            "speedup": 2.0,
            "psnr": 35.0,
            "fewer_steps_psnr": 30.0 if t < 0.2 else None,
        }
        for forecast in (True, False)
        for t in (0.06, 0.1, 0.16, 0.25)
    ]
    compared = {"ours_s": THREE, "diffusers_s": THREE, "time_ratio": THREE, "products_over_diffusers": THREE}
    compared |= {"operations": [400, 500], "written_ratio": 0.8}
    models = ("caption model", "two layers of the 0.6B")
    speeds = {"ours_s": THREE, "transformers_s": THREE, "speed": THREE, "tokens_per_second": 9.0, "same_tokens": 1.0}
    return {
        "picture": {
            "machine": MACHINE,
            "weights_mib": 50.0,
            "files_mib": 25.0,
            "picture": PICTURE,
            "dit": {"2": FORWARD, "32": FORWARD},
            "cold": {
                "processes": {"import torch": {"seconds": THREE, "peak_mib": 300}},
                "generate_above_import_torch_s": THREE,
            },
        },
        "diffusers": {
            "machine": MACHINE,
            "stacks": stacks,
            "guided_step": {"ours_s": THREE, "diffusers_s": THREE, "time_ratio": THREE, "max_abs_difference": 1e-6},
        },
        "optimizations": {
            "machine": MACHINE,
            "stages": {"denoise": 1.0},
            "switches": {
                name: {"time_ratio": THREE, "max_abs_difference": 1e-6}
                for name in (*SWITCHES, "step_cache 0", "step_cache 0.1")
            },
            "prompt_cache": {"encode_s": THREE, "hit_s": THREE, "times_faster": [300.0, 200.0, 400.0]},
            "memory": {
                "batched_over_sequential_cfg": 1.9,
                "attention": ATTENTION,
                "tiles": {"latents": [96, 96], "peak_ratio": 0.3, "time_ratio": THREE, "psnr": 40.0},
            },
            "solvers": [{"solver": "euler", "shift": 1.0, "calls": 4, "psnr": 20.0}],
            "fewer_steps": [{"steps": 14, "speedup": 2.0, "psnr": 30.0}],
            "step_cache": caches,
            "step_cache_title": "A title",
            "guidance": [{"name": "w = 3", "calls": 56, "right": 0.9, "of": 48, "median_distance": 9.0}],
            "compile": {
                "warmup_seconds": 30.0,
                "ratio": THREE,
                "max_abs_difference": 1e-6,
                "steps_until_it_pays": None,
            },
            "dtypes": {"bf16_over_fp32": THREE, "upcast_over_fp32": THREE, "max_abs_difference": 0.01},
            "roofline": {
                "peak_gflops": 50.0,
                "bandwidth_gbs": 10.0,
                "ridge": 5.0,
                "points": [
                    {"name": "DiT, 16 tokens", "kind": "DiT", "intensity": 4.0, "gflops": 9.0, "seconds": THREE}
                ],
            },
        },
        "minivllm": {
            "machine": MACHINE,
            "transformers": [
                {"model": model, "batch": batch, "max_abs_difference": 1e-6} | speeds
                for model in models
                for batch in (1, 8)
            ],
            "paged": [
                {"model": model, "tokens": n, "paged_s": THREE, "contiguous_s": THREE, "time_ratio": THREE}
                for model in models
                for n in (16, 64, 240)
            ],
            "cache": {"tokens": 512, "without_s": THREE, "with_s": THREE, "speed": THREE},
        },
        "reference": {
            "machine": MACHINE,
            "rows": [
                {"family": family, "dtype": dtype, "weights": 10**6, "peak_ratio": 0.8, "difference": 1e-6}
                | {"operations": [90, 100], "written_ratio": 0.9, "ahead_over_step": 0.01}
                | {"saved": {"matrix products": 0.01, "views, dispatch, Python": -0.01}}
                | compared
                for dtype in ("float32", "bfloat16")
                for family in FAMILIES
            ],
        },
    }
