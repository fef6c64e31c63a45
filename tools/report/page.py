"""The page that `fskv report` writes, from a template: HTML without a script, complete in itself.

Every text that comes from a disk or an endpoint is made printable (`show`) and escaped by jinja2.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from fskv import __version__

from .. import survey
from ..endpoint import Endpoint
from ..exits import CommandError
from ..root_view import by_line
from ..terminal import ago, iec, many, rfc3339, show


def check_installed() -> None:
    """Raise CommandError unless the packages for a page are installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        hint = "a page needs it: pip install 'fskv[report]'"
        raise CommandError(f"report: {error.name} is not installed; {hint}") from None


def page(seen: survey.Survey, walk: survey.Walk, endpoints: Sequence[Endpoint] = ()) -> str:
    """Return the whole page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from . import figures

    def finalize(value: Any) -> Any:
        return show(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    jinja = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
    )
    jinja.filters |= {"iec": iec, "many": many, "share": _share, "num": "{:,}".format}
    jinja.filters["ago"] = lambda ns: ago(ns, walk.at_ns)
    text = jinja.get_template("page.html.j2").render(
        seen=seen,
        at=(rfc3339(seen.at_ns) or "")[:19].replace("T", " "),
        walk=walk,
        spaces=by_line(walk.namespaces),
        unused=[(f"{days} d", walk.unused(days * survey.DAY)) for days in (1, 7, 30)],
        last_use=figures.by_last_use(walk),
        warnings=survey.warnings(seen, walk),
        endpoints=endpoints,
        colours=(figures.LIGHT, figures.DARK),
        version=__version__,
    )
    # Nothing may be loaded or run, and no style but this sheet is used: not one that a name brought in.
    (sheet,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    return text.replace("STYLE-SHA256", f"sha256-{digest}", 1)


def _share(part: float | None, whole: float = 1) -> str:
    return f"{100 * part / whole:.1f} %" if whole and part is not None else "-"
