"""The page that `fskv report` writes, from a template: HTML without a script, complete in itself.

Every text that comes from a disk or an endpoint is made printable (`show`) and escaped by jinja2.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from fskv import __version__

from .. import survey
from ..endpoint import Endpoint
from ..exits import CommandError
from ..root_view import by_line
from ..terminal import ago, iec, many, rfc3339, show
from ..usage import RootUsage


def check_installed() -> None:
    """Raise CommandError unless the package for a page is installed."""
    if importlib.util.find_spec("jinja2") is None:
        hint = "a page needs it: pip install '.[report]'"
        raise CommandError(f"report: jinja2 is not installed; {hint}")


def page(seen: survey.Survey, counted: RootUsage, endpoints: Sequence[Endpoint] = ()) -> str:
    """Return the whole page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def finalize(value: Any) -> Any:
        return show(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    jinja = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
    )
    jinja.filters |= {"iec": iec, "many": many, "share": _share, "num": "{:,}".format}
    jinja.filters["ago"] = lambda ns: ago(ns, counted.at_ns)
    text = jinja.get_template("page.html.j2").render(
        seen=seen,
        at=(rfc3339(seen.at_ns) or "")[:19].replace("T", " "),
        spaces=by_line(counted.rows),
        num_spaces=len(counted.namespaces),
        unused=dict(zip(counted.ages, (nbytes for _, nbytes in counted.total.unused), strict=True)),
        warnings=survey.warnings(seen, counted),
        endpoints=endpoints,
        version=__version__,
    )
    # Nothing may be loaded or run, and no style but this sheet is used: not one that a name brought in.
    (sheet,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    return text.replace("STYLE-SHA256", f"sha256-{digest}", 1)


def _share(part: float | None, whole: float = 1) -> str:
    return f"{100 * part / whole:.1f} %" if whole and part is not None else "-"
