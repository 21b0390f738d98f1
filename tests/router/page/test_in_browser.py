"""What only a browser knows: that the page is drawn, and how large."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import msgspec
import pytest

from router.page.html import page

from .browser import CHROMIUM, browse
from .made import FIGURES, comparison

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
]

MEASURE = """<script>
const rects = query => [...document.querySelectorAll(query)].map(e => e.getBoundingClientRect());
const inside = (text, svg) => text.left >= svg.left - 1 && text.right <= svg.right + 1 && text.bottom <= svg.bottom + 1;
document.body.dataset.measured = JSON.stringify({
  svgs: rects("svg").map(r => [r.width, r.height]),
  lines: rects("polyline, rect.bar").map(r => r.width + r.height),
  rows: rects("tbody tr").map(r => r.height),
  outside: [...document.querySelectorAll("svg text")].filter(
    t => !inside(t.getBoundingClientRect(), t.closest("svg").getBoundingClientRect())).map(t => t.textContent),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  cut: [...document.querySelectorAll("div")].map(e => e.scrollWidth - e.clientWidth).filter(w => w > 0).length,
  keys: getComputedStyle(document.querySelector(".key i")).printColorAdjust,
  paper: getComputedStyle(document.body).backgroundColor })
</script></body>"""
MANY = page(comparison(("kv", "least-loaded", "power-of-two", "random"), (0.5, 1.0, 2.0), (0, 1, 2)))


class Measured(msgspec.Struct):
    svgs: list[tuple[float, float]]
    lines: list[float]
    rows: list[float]
    outside: list[str]
    """Texts of charts that are cut off."""
    wide: float
    """By how much the page is wider than its window."""
    cut: int
    """Parts that are wider than is seen of them."""
    keys: str
    """Whether the colours of the legend are printed where backgrounds are not."""
    paper: str


def measured(path: Path, text: str, *flags: str) -> Measured:
    path.write_text(text.replace("</body>", MEASURE), "utf-8")
    document, _ = browse(path, *flags)
    found = re.search(r'data-measured="([^"]+)"', document)
    assert found
    return msgspec.json.decode(unescape(found[1]), type=Measured)


def test_the_page_opens_without_a_word_on_the_console(tmp_path: Path) -> None:
    path = tmp_path / "ab.html"
    path.write_text(MANY, "utf-8")
    document, console = browse(path)
    assert console == []
    assert document.count("<svg") == 5 + 3 * 2
    assert "<table>" in document
    # The check can fail: an error would have been seen.
    path.write_text(MANY.replace("</body>", "<script>nonsense()</script></body>"), "utf-8")
    assert "nonsense is not defined" in browse(path)[1][0]


@pytest.mark.parametrize("width", [1280, 600])
def test_charts_and_table_are_drawn_in_their_places(tmp_path: Path, width: int) -> None:
    found = measured(tmp_path / "ab.html", MANY, f"--window-size={width},2000")
    assert len(found.svgs) == 5 + 3 * 2
    assert all(wide > 250 and high > 100 for wide, high in found.svgs)
    assert len(found.lines) == 4 * len(found.svgs)
    assert min(found.lines) > 20
    assert len(found.rows) == 3 * (1 + len(FIGURES) + 1)
    assert min(found.rows) > 15
    assert found.outside == []
    assert found.wide == 0


def test_bars_are_drawn(tmp_path: Path) -> None:
    found = measured(tmp_path / "ab.html", page(comparison(("kv", "power-of-two#2"))))
    assert len(found.svgs) == 5 + 2
    assert min(found.lines) > 20
    assert found.outside == []


def test_a_long_name_stays_beside_its_bar(tmp_path: Path) -> None:
    of = comparison(("kv", "vllm-router-0.1.17-behind-our-gateway-eu1"))
    assert measured(tmp_path / "ab.html", page(of)).outside == []


def test_on_paper_the_legend_has_its_colours_and_the_table_all_columns(tmp_path: Path) -> None:
    printed = MANY.replace("@media print", "@media all")
    assert printed != MANY
    found = measured(tmp_path / "ab.html", printed, "--window-size=760,1000")
    assert (found.keys, found.cut, found.wide) == ("exact", 0, 0)


def test_light_and_dark(tmp_path: Path) -> None:
    light = measured(tmp_path / "light.html", page(comparison()), "--blink-settings=preferredColorScheme=1")
    dark = measured(tmp_path / "dark.html", page(comparison()), "--blink-settings=preferredColorScheme=0")
    assert (light.paper, dark.paper) == ("rgb(255, 255, 255)", "rgb(18, 22, 28)")
