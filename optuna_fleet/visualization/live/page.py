"""The view as a page that needs nothing else, and loads itself anew."""

from __future__ import annotations

import html

from optuna_fleet.visualization.figure import colour_of
from optuna_fleet.visualization.live.view import Table, View

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="{refresh_s:g}">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em;
  color: #222; background: #fff }}
h1 {{ font-size: 1.3em; margin: 0 0 .6em }}
h1 small {{ font-weight: normal; margin-left: .6em }}
h2 {{ font-size: 1em; margin: 1.6em 0 .3em }}
.alarm {{ color: #b2182b; font-weight: bold }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1em 1.4em; margin: 0 }}
dt, th, footer {{ color: #666 }}
dd {{ margin: 0 }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; padding: .2em .9em .2em 0; border-bottom: 1px solid #eee }}
th {{ font-weight: normal }}
td:first-child {{ white-space: nowrap }}
td:last-child {{ word-break: break-word }}
i {{ display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em }}
footer {{ margin-top: 2em; font-size: .9em }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #ddd; background: #1b1b1b }} dt, th, footer {{ color: #999 }}
  th, td {{ border-color: #333 }} .alarm {{ color: #ff7b7b }}
}}
</style>
</head>
<body>
<h1>{title} <small{alarm}>{condition}</small></h1>
<dl>
{facts}
</dl>
{tables}
<footer>As of {time}<span id="age" class="alarm"></span></footer>
<script>
const written = {written_ms}, late = {late_ms};
function tell() {{
  const age = Date.now() - written;
  document.getElementById("age").textContent =
    age < late ? "" : ": " + Math.round(age / 1000) + " s old. Does `optuna-fleet top` still run?";
}}
tell();
setInterval(tell, 1000);
</script>
</body>
</html>
"""


def page(view: View, written: float, refresh_s: float) -> str:
    """The page's text."""
    return _PAGE.format(
        refresh_s=refresh_s,
        title=html.escape(view.title),
        condition=html.escape(view.condition),
        alarm=' class="alarm"' if view.is_alarming else "",
        facts="\n".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
            for name, text in view.facts
        ),
        tables="\n".join(_table(table) for table in view.tables),
        time=html.escape(view.time),
        written_ms=int(1e3 * written),
        late_ms=int(1e3 * (3 * refresh_s + 10)),
    )


def _table(table: Table) -> str:
    headings = "".join(f"<th>{html.escape(heading)}</th>" for heading in table.headings)
    rows = "\n".join(
        f"<tr><td>{_square(trial)}{'</td><td>'.join(html.escape(cell) for cell in row)}</td></tr>"
        for row, trial in zip(table.rows, table.trials, strict=True)
    )
    return (
        f"<h2>{html.escape(table.title)}</h2>\n"
        f"<table><thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    )


def _square(trial: int | None) -> str:
    return "" if trial is None else f'<i style="background: {colour_of(trial)}"></i>'
