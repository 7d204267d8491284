"""``make bench``: what a picture costs on this machine, next to what its arithmetic must cost.

    python -m recipes.bench                        # every section; writes notes/bench.json and notes/bench.md
    python -m recipes.bench picture diffusers      # these sections; the others keep their numbers

One file a section, one line in `SECTIONS`: a module with ``TITLE``, ``measure(bench)``, which returns what JSON can hold, and
``markdown(found)``, which turns that into lines. Ratios and shares travel between machines, seconds do not. Each number is the
median of at least five runs after a warm-up, with the smallest and the largest; runs that are compared take turns, and their
ratio is taken round by round. The machine's own rate for large matrix products (GEMM) and its copy bandwidth are measured in
the same run and quoted as the limit. A missed goal is printed with its arithmetic.
"""

SECTIONS = {  # name → module, in the order of the report
    "picture": "recipes.bench.picture",
    "diffusers": "recipes.bench.blocks",
    "optimizations": "recipes.bench.optimizations",
    "reference": "recipes.bench.reference",
    "minivllm": "recipes.bench.minivllm",
}
