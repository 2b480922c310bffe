"""The report's series stay apart for eyes that confuse colours, and stand out from the page."""

import itertools
import math
import re
from importlib import resources

import pytest

STYLE = (resources.files("saccade.bench.report") / "style.css").read_text(encoding="utf-8")
COLOURS = re.findall(r"--([a-z]+(?:-\d)?): light-dark\((#\w{6}), (#\w{6})\);", STYLE)

# What is left of linear red, green and blue: Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip
THEMES = {"light": 0, "dark": 1}
WHITE = (0.9505, 1.0, 1.089)
APART = 20.0  # CIE76; 2.3 is just noticeable


def linear(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def product(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(light):
    """CIE L*a*b* of linear sRGB, D65."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    clipped = [min(1.0, max(0.0, part)) for part in light]
    ratios = [part / white for part, white in zip(product(to_xyz, clipped), WHITE, strict=True)]
    roots = [r ** (1 / 3) if r > 0.008856 else 7.787 * r + 16 / 116 for r in ratios]
    return 116 * roots[1] - 16, 500 * (roots[0] - roots[1]), 200 * (roots[1] - roots[2])


def luminance(colour):
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def colours(theme):
    return {name: values[THEMES[theme]] for name, *values in COLOURS}


def series(theme):
    found = {name: one for name, one in colours(theme).items() if name[-1].isdigit()}
    assert len(found) == 9
    return found


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eyes", EYES)
def test_series_stay_apart(theme, eyes):
    seen = {name: lab(product(EYES[eyes], linear(one))) for name, one in series(theme).items()}
    for one, other in itertools.combinations(seen, 2):
        assert math.dist(seen[one], seen[other]) > APART, (one, other)


@pytest.mark.parametrize("theme", THEMES)
def test_what_is_drawn_and_written_stands_out(theme):
    named = colours(theme)
    for name, one in series(theme).items():
        assert contrast(one, named["surface"]) >= 3, name  # WCAG 2: graphics
    for name in ("text", "quiet", "good", "bad", "open"):
        for behind in ("page", "surface", "hover"):
            assert contrast(named[name], named[behind]) >= 4.5, (name, behind)  # WCAG 2: text
    assert contrast(named["accent"], named["page"]) >= 3
