"""Draws small SVG charts for the report: lines with bands, a stacked bar and a Gantt chart. All functions are
pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# The first six can be told apart with any kind of colour vision (Okabe and Ito).
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#7f7f7f", "#8c6d31", "#5e3c99", "#80b1d3", "#b3de69", "#a6761d", "#e7298a", "#1b9e77", "#666699", "#c49c94"),
)
_WIDTH, _HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 38


@dataclass(frozen=True)
class Series:
    """A line of y over x. With `band` there is also an area from y - band to y + band. Points that are not finite are
    left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: Sequence[float] | None = None

    def points(self) -> list[tuple[float, float, float]]:
        """The finite points as (x, y, half the width of the band)."""
        bands = self.band or [0.0] * len(self.x)
        rows = zip(self.x, self.y, bands, strict=True)
        return [(x, y, b if math.isfinite(b) else 0.0) for x, y, b in rows if math.isfinite(x) and math.isfinite(y)]


def ticks(low: float, high: float, wanted: int = 5, *, whole: bool = False) -> list[float]:
    """About `wanted` round numbers within [low, high]. Their distance is 1, 2, 2.5 or 5 times a power of ten. `whole`:
    only integers."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    if whole:
        step = float(max(1, math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def number(value: float) -> str:
    """A number with about four significant digits."""
    return _exponent(f"{value:.4g}")


def labels(values: Sequence[float]) -> list[str]:
    """Labels of ticks, with enough digits to tell them apart."""
    for digits in range(3, 12):
        found = [f"{value:.{digits}g}" for value in values]
        if len(set(found)) == len(set(values)) or digits == 11:
            break
    return [_exponent(text) for text in found]


def _exponent(text: str) -> str:
    """Turn '1e-05' into '1e-5', and '2e+03' into '2000'."""
    if "e" not in text:
        return text
    mantissa, _, power = text.partition("e")
    return f"{float(text):.0f}" if 0 <= int(power) < 6 else f"{mantissa}e{int(power)}"


def _text(x: float, y: float, label: str, *, anchor: str = "middle", cls: str = "tick", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{cls}"{extra}>{escape(label)}</text>'


def line_chart(title: str, x_label: str, series: Sequence[Series]) -> str:
    """A chart with a tooltip at each point, and a legend if there are several lines. Empty if no series has a point."""
    drawn = [(s, p) for s in series if (p := s.points())]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _, _ in points]
    lows = [y - b for _, points in drawn for _, y, b in points]
    highs = [y + b for _, points in drawn for _, y, b in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(lows), max(highs)
    if x0 == x1:
        x0, x1 = x0 - 0.5, x1 + 0.5
    margin = (y1 - y0) * 0.06 or max(abs(y1) * 0.1, 0.5)
    y0, y1 = y0 - margin, y1 + margin

    def at_x(x: float) -> float:
        return _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    rows = ticks(y0, y1)
    for tick, label in zip(rows, labels(rows), strict=True):
        y = at_y(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 6, y + 4, label, anchor="end"))
    for tick in ticks(x0, x1, whole=all(x == round(x) for x in xs)):
        parts.append(_text(at_x(tick), _HEIGHT - _BOTTOM + 16, number(tick)))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_label, cls="axis"))
    for index, (one, points) in enumerate(drawn):
        colour = COLOURS[index % len(COLOURS)]
        if one.band is not None and len(points) > 1:
            upper = [f"{at_x(x):.1f},{at_y(y + b):.1f}" for x, y, b in points]
            lower = [f"{at_x(x):.1f},{at_y(y - b):.1f}" for x, y, b in reversed(points)]
            parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.18"/>')
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for x, y, b in points[:: max(1, len(points) // 200)]:
            tip = f"{one.label}, {x_label} {number(x)}: {number(y)}" + (f" ± {number(b)}" if one.band else "")
            radius = 2.4 if len(points) <= 60 else 1.4
            parts.append(
                f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="{radius}" fill="{colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
    legend = _legend([(s.label, COLOURS[i % len(COLOURS)]) for i, (s, _) in enumerate(drawn)]) if len(drawn) > 1 else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>{legend}</figure>'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for label, colour in entries)
    return f'<div class="legend">{items}</div>'


def share_bar(title: str, parts: Sequence[tuple[str, float]], unit: str = "s") -> str:
    """One bar split by shares, with the numbers in its legend. Empty if their sum is 0."""
    total = math.fsum(value for _, value in parts)
    if total <= 0:
        return ""
    width, height = 940, 30
    x, boxes, entries = 0.0, [], []
    for index, (label, value) in enumerate(parts):
        share = value / total
        colour = COLOURS[index % len(COLOURS)]
        tip = escape(f"{label}: {value:.1f} {unit}, {share:.1%}")
        boxes.append(
            f'<rect x="{x:.2f}" y="0" width="{share * width:.2f}" height="{height}" fill="{colour}">'
            f"<title>{tip}</title></rect>"
        )
        if share > 0.08:
            boxes.append(_text(x + share * width / 2, height / 2 + 4, f"{share:.0%}", cls="inbar"))
        entries.append((f"{label} {value:.1f} {unit} ({share:.1%})", colour))
        x += share * width
    return (
        f'<figure class="wide"><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(boxes)}</svg>{_legend(entries)}</figure>'
    )


def _kind(name: str) -> str:
    """The name without its number. 'sample 12' and 'sample 13' are of the kind 'sample'."""
    return re.sub(r"[\s/#:._-]*\d.*$", "", name) or name


@dataclass(frozen=True)
class ChartBar:
    """One bar of a Gantt chart, in seconds from the chart's start."""

    track: str
    name: str
    start: float
    end: float
    detail: str = ""


def gantt(
    title: str,
    bars: Sequence[ChartBar],
    kinds: Sequence[str],
    width: int = 940,
    end: float | None = None,
    axis: str = "seconds",
) -> str:
    """A Gantt chart. It has a row for each track, in the order in which the tracks appear. Bars are coloured by kind,
    and `kinds` come first. `end`: the end of the scale. None: the end of the last bar. `axis`: the label of the scale.

    Only the 4000 longest bars are drawn. Even a short bar is visible."""
    if not bars:
        return ""
    kept = sorted(bars, key=lambda b: b.start - b.end)[:4000]
    tracks = {name: row for row, name in enumerate(dict.fromkeys(b.track for b in bars))}
    found = dict.fromkeys(_kind(b.name) for b in kept)
    names = [k for k in kinds if k in found] + [n for n in found if n not in kinds]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    end = end or max(b.end for b in kept) or 1.0
    left, top = 170, 6
    # Hundreds of running samples are hundreds of tracks. They are thin then, and those of samples have no label.
    row = 22.0 if len(tracks) <= 40 else max(2.5, 880 / len(tracks))
    height = top + row * len(tracks) + 34
    scale = (width - left - 14) / end
    parts = []
    for name, index in tracks.items():
        y = top + index * row
        if index % 2 == 0:
            box = f'<rect x="{left}" y="{y:.1f}" width="{width - left - 14}" height="{row:.1f}" class="stripe"/>'
            parts.append(box)
        if row >= 12 or "#" not in name:
            parts.append(_text(left - 8, y + row / 2 + 4, name, anchor="end"))
    bottom = top + row * len(tracks)
    for tick in ticks(0.0, end, 8):
        x = left + tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="grid"/>')
        parts.append(_text(x, bottom + 16, number(tick)))
    parts.append(_text((left + width) / 2, height - 2, axis, cls="axis"))
    for bar in sorted(kept, key=lambda b: b.end - b.start, reverse=True):
        gap = 3.0 if row >= 12 else 0.25
        y = top + tracks[bar.track] * row + gap
        tip = f"{bar.name}: {bar.end - bar.start:.3f} s from {bar.start:.3f} s" + (
            f" ({bar.detail})" if bar.detail else ""
        )
        x, length = left + bar.start * scale, max(1.0, (bar.end - bar.start) * scale)
        parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{length:.2f}" height="{row - 2 * gap:.2f}" rx="1.5" '
            f'fill="{colours[_kind(bar.name)]}"><title>{escape(tip)}</title></rect>'
        )
    legend = _legend([(name, colours[name]) for name in names[:16]])
    return (
        f'<figure class="wide"><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>{legend}</figure>'
    )
