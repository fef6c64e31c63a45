"""`fskv report`: its options; the work is done in `tools.survey` and `tools.report`."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from fskv.bounds.lease import TTL_S
from fskv.root.files import publishing
from fskv.root.process_id import unique_name

from ..endpoint import TIMEOUT_S, Endpoint, Scraper, addresses
from ..exits import UsageError, outcome
from ..options import MetricsOption, RootOption
from ..root_view import RootView
from ..terminal import iec, many, progress, say, show


def command(
    root: RootOption,
    html: Annotated[
        str, typer.Option(metavar="FILE", help="The page to write.")
    ] = "fskv-report.html",
    metrics: MetricsOption = None,
) -> None:
    """Write one self-contained HTML page about a root: what is there, how old, how often used, how healthy.

    The page needs nothing else, neither a script nor the network, and is light or dark as the reader's
    system is. Every chunk file is looked at, and the headers of 2000 of them, chosen at random, are read;
    memory does not grow with files. The file is replaced as a whole; what is no plain file is not
    overwritten. Engines on other machines are given some seconds to show that they are alive. It needs
    jinja2 and matplotlib: pip install 'fskv[report]'.

    Exit code 1 if an identity or a header of the sample is damaged, 3 if something could not be listed.
    """
    from .. import survey
    from ..report.page import check_installed, page
    from ..top.watch import Watch

    check_installed()
    urls = addresses(metrics)
    view = RootView.open(root)
    path = _checked(html, view.path)
    observer, began = survey.Observer(view), time.monotonic()
    observer.look()
    with progress() as drawn:
        task = drawn.add_task("namespaces", total=None)
        walk = survey.walk(view, lambda done, all_: drawn.update(task, completed=done, total=all_))
    judged = walk.judged()
    asked = [Watch(Scraper(url).look, 3600.0) for url in urls]
    seen = observer.look(walk)
    while any(one.status == survey.UNKNOWN for one in seen.engines):
        if time.monotonic() - began > TTL_S / 2:
            break
        time.sleep(0.5)
        seen = observer.look(walk)
    for one in asked:
        one.wait(began + 2 * TIMEOUT_S)
    answers = [
        one.answer or Endpoint(url, one.words or "no answer")
        for url, one in zip(urls, asked, strict=True)
    ]
    text = page(seen, walk, judged, answers if urls else None)
    data = text.encode("utf-8", "backslashreplace")
    part = f"{os.path.dirname(path)}/.fskv-report-{unique_name()}.part"
    with publishing(path, 0o666, part=part, umask=True) as file:  # a page is for others to read
        file.write(data)
    size = walk.total()
    say(f"{path}: {iec(len(data))}, about {many(size.files, 'file')} of {iec(size.nbytes)}")
    problems = judged.damaged or any(one.namespace.problem for one in walk.namespaces)
    raise typer.Exit(outcome(problems=problems, partial=walk.unlistable or seen.problem))


def _checked(path: str, root: str) -> str:
    """Return the absolute path; raises UsageError where no page can or should be put. Known before a walk."""
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
