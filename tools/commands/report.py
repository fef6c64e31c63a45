"""`fskv report`: one HTML page about a root, without a script, complete in itself.

Every text that comes from a disk is made printable (`show`) and escaped by jinja2.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from typing import Annotated, Any

import typer

from fskv import __version__
from fskv.root.files import publishing
from fskv.root.process_id import unique_name

from ..exits import CommandError, UsageError, outcome
from ..options import RootOption
from ..root_view import RootView, by_line
from ..survey import Observer, Survey, warnings
from ..terminal import ago, iec, many, rfc3339, say, share, show, walk_progress
from ..usage import RootUsage

_AGES = ("1h", "6h", "1d", "7d", "30d", "180d")


def command(
    root: RootOption,
    html: Annotated[
        str, typer.Option(metavar="FILE", help="The page to write.")
    ] = "fskv-report.html",
) -> None:
    """Write one HTML page about a root: content, ages and health.

    The command needs jinja2: pip install '.[report]'. The page needs no network and no script.
    """
    try:
        import jinja2
    except ImportError:
        hint = "a page needs it: pip install '.[report]'"
        raise CommandError(f"report: jinja2 is not installed; {hint}") from None
    view = RootView.open(root)
    path = _checked(html, view.path)
    spaces = view.namespaces()
    counted = RootUsage(view.path, spaces, _AGES)
    with walk_progress("looking", len(spaces)) as step:
        counted.count(step)
    seen = Observer(view).look(counted)
    jinja = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
    )
    text = _page(jinja, seen, counted)
    data = text.encode("utf-8", "backslashreplace")
    part = f"{os.path.dirname(path)}/.fskv-report-{unique_name()}.part"
    with publishing(path, 0o666, part=part, umask=True) as file:  # a page is for others to read
        file.write(data)
    shown = f"{many(seen.usage.num_files, 'file')} in the root, {iec(seen.usage.nbytes)}"
    say(f"{path}: {iec(len(data))}; {shown}")
    if seen.damaged:
        say(f"{many(seen.damaged, 'damaged namespace')}: `fskv ls` says which, and why")
    partial = seen.unlistable or seen.problem
    raise typer.Exit(outcome(problems=seen.damaged, partial=partial))


def _checked(path: str, root: str) -> str:
    """Return the absolute path. Raises UsageError where no page can or should be put."""
    whole = os.path.abspath(path)
    name, folder = show(path), os.path.dirname(whole)
    if path == "-" or "\0" in path or not os.path.basename(path):
        raise UsageError(f"--html: found {name!r}, expected the name of a file")
    if os.path.lexists(whole) and (os.path.islink(whole) or not os.path.isfile(whole)):
        raise UsageError(f"--html: {name} is there and is no plain file; it is left alone")
    if f"{os.path.realpath(folder)}/".startswith(os.path.realpath(root).rstrip("/") + "/"):
        raise UsageError(f"--html: {name} is inside the root; all that is in there belongs to fskv")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html: {show(folder)} is no directory that can be written")
    return whole


def _printable(value: Any) -> Any:
    return show(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _page(jinja: Any, seen: Survey, counted: RootUsage) -> str:
    """Return the whole page."""
    jinja.filters |= {"iec": iec, "many": many, "share": share, "num": "{:,}".format}
    jinja.filters["ago"] = lambda ns: ago(ns, counted.at_ns)
    text: str = jinja.get_template("report.html.j2").render(
        seen=seen,
        at=(rfc3339(seen.at_ns) or "")[:19].replace("T", " "),
        spaces=by_line(counted.rows),
        num_spaces=len(counted.namespaces),
        unused=dict(zip(counted.ages, (nbytes for _, nbytes in counted.total.unused), strict=True)),
        warnings=warnings(seen, counted),
        version=__version__,
    )
    # Nothing may be loaded or run, and no style but this sheet is used: not one that a name brought in.
    (sheet,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    return text.replace("STYLE-SHA256", f"sha256-{digest}", 1)
