"""The picture on the first page: chapter 01's idea. Noise on the left, a heart on the right, one straight road for each point."""

import random

WIDTH, HEIGHT = 960, 300


def hero_svg(points: int = 230, seed: int = 4) -> str:
    """The drawing as inline SVG; its colours come from the style sheet, so it follows the theme.

    Args:
        points: roads drawn.
        seed: of the noise.
    """
    draw = random.Random(seed)
    roads, ends = [], []
    for number in range(points):
        x1, y1 = in_heart(draw)
        x0, y0 = 150 + 58 * draw.gauss(0, 1), HEIGHT / 2 + 52 * draw.gauss(0, 1)
        y0 = min(max(y0, 8), HEIGHT - 8)
        roads.append(f"M{x0:.0f} {y0:.0f}L{x1:.0f} {y1:.0f}")
        ends.append((x0, y0, "noise"))
        step = draw.choice((0.25, 0.5, 0.75))  # a few points still on their way
        if number % 4 == 0:
            ends.append((x0 + step * (x1 - x0), y0 + step * (y1 - y0), "middle"))
        ends.append((x1, y1, "data"))
    dots = "".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y, kind in ends)
    return (
        f'<svg class="hero" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="LABEL">'
        f'<path class="roads" d="{"".join(roads)}"/>{dots}</svg>'
    )


def in_heart(draw: random.Random) -> tuple[float, float]:
    """A point drawn evenly from the heart (x² + y² − 1)³ < x²·y³, in the drawing's units."""
    while True:
        x, y = draw.uniform(-1.3, 1.3), draw.uniform(-1.1, 1.3)
        if (x * x + y * y - 1) ** 3 < x * x * y**3:
            return 800 + 105 * x, HEIGHT / 2 + 10 - 105 * y
