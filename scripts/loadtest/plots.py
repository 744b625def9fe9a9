"""Line plots as SVG text (pure).

Owns scales, ticks and drawing; must never know what the figures mean. Invariant: the text is complete in itself (no
script, no style sheet, no address), so that it can stand in any page; every text in it is escaped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
# Distinguishable also without colour vision (Okabe and Ito), and on white and black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")

# From a value to its place.
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Line:
    """Points of one series; those with nan are left out."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def finite(self) -> list[tuple[float, float]]:
        """What can be drawn."""
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True)
class Plot:
    """One picture. log_x: for values that double. note: a word under the title."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line] = field(default_factory=tuple)
    log_x: bool = False


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """12000 -> 12k, 0.25 -> 0.25."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if suffix == "k" else limit
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.4g}"


def svg(plot: Plot, background: str = "") -> str:
    """The picture. background: a colour for pictures that stand alone; in a page the page's own shows through."""
    points = [point for line in plot.lines for point in line.finite]
    if not points:
        return _framed(plot, [_text(WIDTH / 2, HEIGHT / 2, "nothing was measured", "middle")], background)
    xs = sorted({x for x, _ in points})
    x_ticks = xs if plot.log_x and len(xs) <= 10 else ticks(xs[0], xs[-1])
    y_ticks = ticks(0.0, max(y for _, y in points))
    place_x = _scale(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT, plot.log_x)
    place_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, False)
    parts = [_grid(place_y(tick), tick) for tick in y_ticks]
    parts += [_text(place_x(tick), HEIGHT - BOTTOM + 16, short(tick), "middle") for tick in x_ticks]
    for number, line in enumerate(plot.lines):
        parts.append(_drawn(line, COLOURS[number % len(COLOURS)], place_x, place_y))
    return _framed(plot, parts, background)


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    if log and low > 0:
        low, high = math.log(low), math.log(high)
    width = (high - low) or 1.0
    middle = high == low

    def place(value: float) -> float:
        at = math.log(value) if log and value > 0 else value
        return (start + end) / 2 if middle else start + (at - low) / width * (end - start)

    return place


def _grid(y: float, value: float) -> str:
    ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
    line = f'<line {ends} stroke="currentColor" stroke-opacity=".15"/>'
    return line + _text(LEFT - 6, y + 4, short(value), "end")


def _drawn(line: Line, colour: str, place_x: Scale, place_y: Scale) -> str:
    placed = [(place_x(x), place_y(y)) for x, y in line.finite]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>' if len(placed) > 1 else ""
    # A curve of a hundred points needs no dots.
    if len(placed) <= 24:
        for (x, y), (at, value) in zip(placed, line.finite, strict=True):
            told = escape(f"{line.name}: {short(value)} at {short(at)}")
            drawn += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{told}</title></circle>'
    return drawn


def _text(x: float, y: float, words: str, anchor: str, size: int = 11) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="currentColor">{escape(words)}</text>'


def _legend(plot: Plot) -> list[str]:
    parts, x = [], float(LEFT)
    for number, line in enumerate(plot.lines):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x:.0f}" y="{TOP - 12}" width="10" height="3" fill="{colour}"/>')
        parts.append(_text(x + 13, TOP - 7, line.name, "start", 10))
        x += 20 + 6.2 * len(line.name)
    return parts


def _framed(plot: Plot, parts: Sequence[str], background: str) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif">'
    if background:
        head += f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{background}"/>'
    frame = [
        f"<title>{escape(plot.title)}</title>",
        _text(LEFT, 15, plot.title, "start", 13),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, plot.x_name, "middle"),
        f'<g transform="rotate(-90 12 {HEIGHT / 2})">{_text(12, HEIGHT / 2, plot.y_name, "middle")}</g>',
    ]
    return "".join([head, *frame, *_legend(plot), *parts, "</svg>"])
