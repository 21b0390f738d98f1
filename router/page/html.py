"""The page itself (pure): one file that needs nothing else, today or in ten years."""

from __future__ import annotations

from html import escape

from router.page.charts import Chart, Group, groups
from router.page.results import Comparison, run_name
from router.page.svg import COLOURS
from router.page.tables import key, table

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #5b6673; --rule: #e3e7ec; --box: #f6f8fa;
  --warn: #8a4b00; --warn-box: #fff4e0; --c0: #0b62c4; --c1: #d9480f; --c2: #0a8a5f; --c3: #9c36b5; --c4: #a17800;
  --c5: #0b8ca6; --c6: #c2255c; --c7: #667080 }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --ink: #e4e8ee; --soft: #98a3b0; --rule: #2a323c;
  --box: #1a2028; --warn: #ffc36b; --warn-box: #33260f; --c0: #5aa9ff; --c1: #ff8a50; --c2: #3fca94; --c3: #d88bf0;
  --c4: #e0b83c; --c5: #4fd0e6; --c6: #ff7aa8; --c7: #9aa5b1 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1320px; padding: 28px 24px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", sans-serif }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 6px } h2 { font-size: 18px; margin: 22px 0 10px }
p { margin: 4px 0; max-width: 90ch } .soft, figcaption p { color: var(--soft) }
.warnings { background: var(--warn-box); color: var(--warn); border-radius: 8px; padding: 10px 16px; margin: 18px 0 0 }
.warnings ul { margin: 4px 0; padding-left: 20px }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 22px 0 0; padding: 10px 0; position: sticky; top: 0;
  background: var(--paper) }
.key { white-space: nowrap } .key i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 7px; vertical-align: -1px }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 18px }
.charts.few { grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)) }
.charts.few figure { max-width: 640px }
figure { margin: 0; border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px 8px }
figcaption { font-weight: 600; margin-bottom: 6px } figcaption p { font-weight: 400; font-size: 13px; margin: 0 }
svg { display: block; width: 100%; height: auto; overflow: visible }
svg text { fill: var(--soft); font-size: 11.5px } svg .axis { text-anchor: middle }
.grid { stroke: var(--rule); fill: none } .line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
.whisker { fill: none; stroke-width: 1.3 } .whisker.ink { stroke: var(--ink) } .bar { opacity: .82 }
.dot { stroke: var(--paper) }
.line.again1 { stroke-dasharray: 9 4 } .line.again2 { stroke-dasharray: 2.5 3 }
.key i.again1 { background-image: linear-gradient(90deg, transparent 40%, var(--paper) 40% 60%, transparent 60%) }
.key i.again2 { background-image: linear-gradient(90deg, transparent 20%, var(--paper) 20% 40%, transparent 40% 60%,
  var(--paper) 60% 80%, transparent 80%) }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 8px; width: fit-content; max-width: 100% }
table { border-collapse: collapse; min-width: min(100%, 760px); font-variant-numeric: tabular-nums }
th, td { padding: 5px 12px; text-align: right; vertical-align: top; border-top: 1px solid var(--rule) }
thead th { border-top: 0 } tbody th { font-weight: 400; white-space: nowrap } tbody th.rate { font-weight: 600 }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper) }
td { white-space: nowrap } th.rate { background: var(--box) }
small, .ratio { font-size: 12.5px; color: var(--soft) }
.ratio { display: inline-block; min-width: 8.5em; margin-left: 1.2em; text-align: left }
.single .ratio { min-width: 3.5em }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 18px; margin: 0 } dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere; font-family: ui-monospace, "Liberation Mono", monospace; font-size: 13px }
.key i { print-color-adjust: exact; -webkit-print-color-adjust: exact }
@media print { .legend { position: static } figure { break-inside: avoid } tr { break-inside: avoid }
  .scroll { overflow: visible; width: auto } table { font-size: 11px } th, td { padding: 3px 5px }
  td, tbody th, table .key { white-space: normal } th:first-child { position: static }
  small, .ratio { font-size: 10px }
  .ratio, .single .ratio { display: block; margin: 0; min-width: 0; text-align: right } }
"""
_COLOURS = "".join(
    f".line.c{n}, .whisker.c{n} {{ stroke: var(--c{n}) }} .dot.c{n}, .bar.c{n} {{ fill: var(--c{n}) }} "
    f"i.c{n} {{ background: var(--c{n}) }}\n"
    for n in range(COLOURS)
)


def page(comparison: Comparison) -> str:
    title = escape(comparison.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}{_COLOURS}</style></head>\n<body>"
        f'<h1>{title}</h1><p>{escape(comparison.about)}</p><p class="soft">{escape(comparison.times)}</p>'
        f"{_warnings(comparison)}{_charts(comparison)}{_table(comparison)}{_facts(comparison)}</body></html>\n"
    )


def _warnings(comparison: Comparison) -> str:
    """The same warning of several runs stands once."""
    said: dict[str, list[str]] = {}
    for result in comparison.results:
        name = run_name(result.policy, result.rate, result.seed, comparison.single)
        for warning in result.warnings:
            said.setdefault(warning, []).append(name)
    if not said:
        return ""
    items = "".join(f"<li>{escape(text)} <small>({escape('; '.join(of))})</small></li>" for text, of in said.items())
    return f'<section class="warnings" role="note"><strong>Before you trust this</strong><ul>{items}</ul></section>'


def _charts(comparison: Comparison) -> str:
    keys = "".join(key(policy, colour) for colour, policy in enumerate(comparison.policies))
    return f'<div class="legend">{keys}</div>' + "".join(_group(group) for group in groups(comparison))


def _group(group: Group) -> str:
    few = " few" if len(group.charts) <= 2 else ""
    figures = "".join(_figure(chart) for chart in group.charts)
    return f'<h2>{escape(group.title)}</h2><section class="charts{few}">{figures}</section>'


def _figure(chart: Chart) -> str:
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return f"<figure><figcaption>{escape(chart.title)}{note}</figcaption>{chart.svg}</figure>\n"


def _table(comparison: Comparison) -> str:
    told, single = escape(_explain(comparison)), "" if comparison.intervals or len(comparison.seeds) > 1 else " single"
    return f'<h2>Numbers</h2><p class="soft">{told}</p><div class="scroll{single}">{table(comparison)}</div>'


def _explain(comparison: Comparison) -> str:
    ratio = f"Behind a number stands its ratio to {comparison.baseline}. " if comparison.relates else ""
    seeds = len(comparison.seeds)
    if comparison.intervals:
        return ratio + comparison.intervals
    if seeds == 1:
        return ratio + "One seed: there are no intervals, and a small difference may be chance."
    return (
        f"Means over {seeds} seeds; ± and brackets are 95 % confidence intervals, by Student's t between seeds. {ratio}"
        "Ratios are taken seed by seed (geometric mean), and are bold where 1 lies outside the interval."
    )


def _facts(comparison: Comparison) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in comparison.facts)
    return f"<h2>How it was made</h2><dl>{facts}</dl>"
