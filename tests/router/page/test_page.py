from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from router.page.charts import groups
from router.page.html import page
from router.page.results import HITS, TTFT_MEAN, Comparison
from router.page.tables import table

from .made import FIGURES, comparison, unknown

MANY = comparison(("kv", "least-loaded", "random"), (0.5, 1.0, 2.0), (0, 1, 2))


def well_formed(text: str) -> ET.Element:
    """A page without void elements left open is XML too, but for its doctype and `<meta>`."""
    body = re.sub(r"<!doctype html>|<meta[^>]*>", "", text)
    return ET.fromstring(body)


@pytest.mark.parametrize("of", [comparison(), comparison(("kv",)), MANY], ids=["two", "one", "many"])
def test_a_page_is_whole_and_needs_nothing_from_outside(of: Comparison) -> None:
    text = page(of)
    tree = well_formed(text)
    assert not re.search(r"(?:src|href)=|url\(|@import|<script|http", text)
    assert "nan" not in text.replace("font-variant-numeric", "")
    for svg in tree.iter("svg"):
        assert svg.get("aria-label")


def test_what_came_from_outside_is_text() -> None:
    text = page(comparison(("<b>kv", "random")))
    assert "<b>kv" not in text
    assert "&lt;i&gt;markup&lt;/i&gt;" in text


def test_curves_where_there_are_several_rates() -> None:
    by_rate, *within = groups(MANY)
    assert [chart.svg.count("<circle") for chart in by_rate.charts] == [9] * 5
    assert all(chart.svg.count("whisker") == 9 for chart in by_rate.charts)
    assert [group.title for group in within] == [f"Within runs at rate {rate}" for rate in ("0.5", "1", "2")]
    assert all(chart.svg.count("<polyline") == 3 for group in within for chart in group.charts)


def test_bars_where_there_is_one_rate() -> None:
    glance, within = groups(comparison())
    assert [chart.svg.count("<rect") for chart in glance.charts] == [2] * 5
    assert len(within.charts) == 2


def test_a_long_name_is_cut_beside_its_bar_and_told_whole_when_pointed_at() -> None:
    chart = groups(comparison(("kv", "vllm-router-0.1.17-behind-our-gateway")))[0].charts[0]
    assert "<title>vllm-router-0.1.17-behind-our-gateway</title>vllm-rout…teway</text>" in chart.svg
    assert ">kv</text>" in chart.svg


def test_a_distribution_goes_from_none_to_all() -> None:
    """Its first point lies on the floor, its last at the top."""
    chart = groups(comparison())[1].charts[0]
    points = re.findall(r'points="([^"]+)"', chart.svg)[0].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert heights == sorted(heights, reverse=True)
    assert (heights[0], heights[-1]) == (208.0, 12.0)


def test_a_run_of_one_window_has_a_dot_where_a_line_has_no_length() -> None:
    short = [one._replace(ttft=[0.25], imbalance=[(0.0, 1.5)]) for one in comparison().results]
    balance = groups(comparison()._replace(results=short))[1].charts[1]
    assert balance.title == "Imbalance over time"
    assert balance.svg.count("<circle") == 2
    assert "kv: 1.5 at 0" in balance.svg
    assert "<circle" not in groups(comparison())[1].charts[1].svg


def test_the_table_tells_intervals_and_ratios() -> None:
    text = table(MANY)
    assert text.count("<tr>") == 1 + 3 * (1 + len(FIGURES) + 1)
    assert "±" in text
    # `random` takes three times as long as kv, in every seed.
    assert "<b>0.33×</b> (0.33–0.33)" in text
    assert "60, 50" in text
    assert MANY.ratio(HITS, "kv", 1.0).mean == pytest.approx(3.0)


def test_an_end_of_eleven_digits_is_told_in_a_few() -> None:
    """Of two seeds that disagree, 95 % intervals reach far."""
    slow = [one._replace(values={**one.values, TTFT_MEAN: 40.0}) for one in comparison(("kv",), seeds=(1,)).results]
    of = comparison(seeds=(0, 1))
    others = [one for one in of.results if (one.policy, one.seed) != ("kv", 1)]
    text = table(of._replace(results=[*others, *slow]))
    assert "(0.00–&gt;9999)" in text
    assert not re.search(r"\d{5}\.", text)


def test_one_seed_has_no_interval() -> None:
    text = page(comparison())
    assert "±" not in text
    assert "One seed: there are no intervals" in text
    assert "0.50×" in text


def test_a_run_without_answers_has_dashes() -> None:
    of = comparison()._replace(results=[unknown("kv"), unknown("random")])
    assert math.isnan(of.mean(TTFT_MEAN, "kv", 1.0).mean)
    half = comparison()._replace(results=[unknown("kv"), comparison().results[1]])
    assert "<td>–</td>" in table(half)
    assert "nan" not in page(half).replace("font-variant-numeric", "")
    assert "nan" not in page(of).replace("font-variant-numeric", "")


def test_a_curve_has_a_gap_at_a_rate_at_which_nothing_was_answered() -> None:
    of = comparison(("kv", "random"), (0.5, 1.0, 2.0, 3.0, 4.0))
    results = [unknown() if (one.policy, one.rate) == ("kv", 1.0) else one for one in of.results]
    (ttft, *_), *_ = [group.charts for group in groups(of._replace(results=results))]
    lines = re.findall(r'<polyline class="line (c\d)" points="([^"]*)"', ttft.svg)
    assert [(colour, len(points.split())) for colour, points in lines] == [("c0", 1), ("c0", 3), ("c1", 5)]
    assert ttft.svg.count("<circle") == 4 + 5


def test_the_same_warning_stands_once() -> None:
    text = page(MANY)
    assert text.count("beware of") == 1
    assert "random at rate 0.5, seed 0; random at rate 0.5, seed 1" in text
    assert "Before you trust this" not in page(comparison(("kv", "round-robin")))


def test_more_lines_than_colours_are_told_apart_and_stay_at_their_rates() -> None:
    names = [f"peer-{number}" for number in range(20)]
    of = comparison(names, (0.5, 1.0, 2.0))
    chart, text = groups(of)[0].charts[0].svg, page(of)
    drawn = re.findall(r'<polyline class="line ([^"]*)" points="([\d.]+),', chart)
    assert len({classes for classes, _ in drawn}) == len(names)
    assert drawn[9][0] == "c1 again1"
    assert float(drawn[-1][1]) - float(drawn[0][1]) < 18, "dots are seven wide"
    keys = text.split("</div>")[0]
    assert all(f'<i class="{classes}"></i>{name}' in keys for name, (classes, _) in zip(names, drawn, strict=True))


def test_a_figure_that_nobody_has_is_no_column() -> None:
    of = comparison()._replace(results=[unknown("kv"), unknown("random")])
    assert HITS in [figure.title for figure in FIGURES]
    assert HITS not in table(of)
