"""`fskv report`: its options; the work is done in `tools.survey` and `tools.report`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fskv.root.files import publishing
from fskv.root.process_id import unique_name

from ..endpoint import Endpoint, NoMetrics, Scraper, addresses
from ..exits import UsageError, outcome
from ..options import MetricsOption, RootOption
from ..root_view import RootView
from ..terminal import iec, many, say, show, walk_progress

_AGES_S = [hours * 3600 for hours in (1, 6, 24, 7 * 24, 30 * 24, 180 * 24)]


def command(
    root: RootOption,
    html: Annotated[
        str, typer.Option(metavar="FILE", help="The page to write.")
    ] = "fskv-report.html",
    metrics: MetricsOption = None,
) -> None:
    """Write one HTML page about a root: content, ages and health.

    The command needs jinja2: pip install '.[report]'. The page needs no network and no script. Exit code 3
    also if an engine gave no metrics.
    """
    from ..report.page import check_installed, page
    from ..survey import Observer
    from ..usage import RootUsage

    check_installed()
    urls = addresses(metrics)
    view = RootView.open(root)
    path = _checked(html, view.path)
    spaces = view.namespaces()
    counted = RootUsage(view.path, spaces, _AGES_S)
    with walk_progress("looking", len(spaces)) as step:
        counted.count(step)
    seen = Observer(view).look(counted)
    answers = list(map(_asked, urls))
    text = page(seen, counted, answers)
    data = text.encode("utf-8", "backslashreplace")
    part = f"{os.path.dirname(path)}/.fskv-report-{unique_name()}.part"
    with publishing(path, 0o666, part=part, umask=True) as file:  # a page is for others to read
        file.write(data)
    shown = f"{many(seen.usage.num_files, 'file')} in the root, {iec(seen.usage.nbytes)}"
    say(f"{path}: {iec(len(data))}; {shown}")
    if seen.damaged:
        say(f"{many(seen.damaged, 'damaged namespace')}: `fskv ls` says which, and why")
    partial = seen.unlistable or seen.problem or not all(one.total for one in answers)
    raise typer.Exit(outcome(problems=seen.damaged, partial=partial))


def _asked(url: str) -> Endpoint:
    """Ask an engine for its metrics; where it gives none, say so, here and on the page."""
    try:
        return Scraper(url).look()
    except NoMetrics as error:
        say(f"--metrics {url}: {error}")
        return Endpoint(url, str(error))


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
