"""The look of the page: one style sheet, light and dark; test_report.py checks that it can be read."""

from __future__ import annotations

import base64
import hashlib

LIGHT = {
    "page": "#f6f7f9",
    "card": "#ffffff",
    "text": "#1c2128",
    "soft": "#57606a",
    "rule": "#d8dee4",
    "mark": "#2f6fb2",
    "fill": "#cfe0f2",
    "good": "#1a7f37",
    "warn": "#8a5a00",
    "bad": "#b42318",
}
DARK = {
    "page": "#0f1318",
    "card": "#181d24",
    "text": "#e6e9ee",
    "soft": "#a3adb9",
    "rule": "#313a45",
    "mark": "#63a8ee",
    "fill": "#20405f",
    "good": "#5cc979",
    "warn": "#e3b341",
    "bad": "#ff8b80",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main,header,footer{max-width:1120px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
h1{font-size:24px;line-height:1.25;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 4px}
h3{font-size:14px;margin:0 0 6px}
p{margin:0 0 10px;max-width:76ch}
.soft{color:var(--soft)}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:18px 20px;margin:16px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0;padding:0}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 16px}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:0;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.tiles dd small{display:block;font-size:13px;font-weight:400;color:var(--soft)}
.pair>section{margin:0}
.pair{display:grid;margin:16px 0;
grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px 36px}
figure{margin:10px 0 0}
.plot{display:block;overflow:visible;width:calc(100% - 72px);margin:12px 8px 0 64px}
.inner{overflow:visible}
.tick{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.mark{fill:var(--mark)}
.over{fill:var(--bad)}
.rail{fill:var(--rule)}
.fill{fill:var(--fill)}
.line{fill:none;stroke:var(--mark);stroke-width:2;stroke-linejoin:round}
.bar{display:block;min-width:70px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;font-size:14px;padding-bottom:4px}
th{font-weight:600;font-size:12.5px;color:var(--soft);text-align:left}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:middle}
tr>:last-child{padding-right:0}
tbody tr:last-child>*{border-bottom:0}
tbody th{color:var(--text);font-weight:400;font-size:inherit;overflow-wrap:anywhere;min-width:9em}
.pair tbody th{min-width:11em}
.n{text-align:right;white-space:nowrap}
.b{width:22%}
.pair .b{width:34%}
tbody th:has(code){min-width:26em}
td:has(code){min-width:18em}
section .pair{margin:6px 0 0}
details{margin-top:8px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
.good{color:var(--good)}
.warn{color:var(--warn)}
.bad{color:var(--bad)}
.state{font-weight:600;white-space:nowrap}
code{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;
font-size:.92em;overflow-wrap:anywhere}
ul{margin:0;padding-left:20px}
footer{padding-bottom:40px;color:var(--soft);font-size:13px}
@media (max-width:560px){main,header,footer{padding-left:12px;padding-right:12px}section{padding:14px}
.tiles{grid-template-columns:1fr 1fr}.tiles dd{font-size:19px}.plot{width:calc(100% - 66px);margin-left:60px}
.tick{font-size:10.5px}body{font-size:14px}th,td{padding-right:9px}
.wide{display:none}tbody th:has(code){min-width:13em}}
@media print{section,.tiles div{break-inside:avoid}body{background:none}}
""".strip().replace("\n", "")

SHEET = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}{_RULES}"
)

_HASH = base64.b64encode(hashlib.sha256(SHEET.encode()).digest()).decode()
# Nothing may be loaded or run, and no style but this sheet is used: not one that a name brought in either.
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
