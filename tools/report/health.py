"""What is not as it should be in a root, and who writes to it: two sections of the page."""

from __future__ import annotations

from fskv.bounds.lease import TTL_S
from fskv.bounds.limits import Heartbeat
from fskv.root.process_id import provably_dead

from ..terminal import iec
from ..top.look import is_here, writer_of
from .markup import note, section, table, text
from .survey import Survey

_MAX_ROWS = 5000


def health_section(survey: Survey) -> str:
    health, ages, reuse, usage = survey.health, survey.ages, survey.reuse, survey.after.usage
    bad_headers = reuse.damaged + reuse.misplaced
    looked = reuse.read + bad_headers + reuse.unreadable
    silent = [b for b in survey.after.heartbeats if status(b, survey)[0] in ("gone", "silent")]
    names = ", ".join(health.foreign_names)
    identities = "; ".join(
        f"{one.namespace.id}: {one.namespace.problem}" for one in survey.problems[:20]
    )
    headers = (
        f"{reuse.damaged:,} damaged and {reuse.misplaced:,} misplaced of {looked:,} headers that were read; "
        "fskv verify looks at all of them"
    )
    unread = (
        f"{health.unlistable:,} directories, {reuse.unreadable:,} files: what is in them is not in "
        "this report"
    )
    untold = survey.after.unread
    clocks = (
        f"{ages.undated.files:,} files without a usable time, {ages.ahead:,} used after now, "
        f"{reuse.backwards:,} of the sample used before they were stored"
    )
    orphans = (
        f"{iec(health.old_parts.nbytes)}; and {health.parts.files - health.old_parts.files:,} younger parts, "
        "which may be in the making. Engines remove orphans, and so does fskv gc"
    )
    foreign = f"never touched by fskv: {names}" + ", ..." * (
        health.foreign > len(health.foreign_names)
    )
    checks = [
        (
            len(survey.problems),
            "bad",
            "Damaged identities",
            identities or "every namespace.json describes its directory",
        ),
        (bad_headers, "bad", "Damaged or misplaced chunk files", headers),
        (
            health.unlistable + reuse.unreadable + (untold is not None),
            "bad",
            "What could not be read",
            f"{unread}; {untold}" if untold else unread,
        ),
        (
            usage.unremovable,
            "bad",
            "Files that cannot be removed",
            "as the engines' pruning found it: permissions, or an immutable flag",
        ),
        (ages.undated.files + ages.ahead + reuse.backwards, "warn", "Clocks", clocks),
        (health.old_parts.files, "warn", "Orphans: parts that are an hour old", orphans),
        (
            health.foreign,
            "warn",
            "Foreign entries",
            foreign if names else "nothing that is not fskv's",
        ),
        (
            len(silent),
            "warn",
            "Engines that are gone or silent",
            ", ".join(writer_of(b.name)[0] for b in silent[:20]) or "none",
        ),
    ]
    rows = [
        [
            text(name),
            f'<span class="state {level if count else "good"}">{f"{count:,}" if count else "none"}</span>',
            text(more),
        ]
        for count, level, name, more in checks
    ]
    return section("health", "Health", table("Health", ["check", "found", "more"], rows))


def status(beat: Heartbeat, survey: Survey) -> tuple[str, str]:
    """Return an engine's state and the class to show it with: what two looks, a walk apart, can say."""
    if provably_dead(beat.name):
        return "gone", "bad"
    first = next((b.beat for b in survey.before.heartbeats if b.name == beat.name), beat.beat)
    if is_here(beat.name) or first != beat.beat:
        return "alive", "good"
    if survey.after.at_s - survey.before.at_s > TTL_S:
        return "silent", "warn"
    return "not known", "soft"


def engines_section(survey: Survey) -> str:
    rows = []
    for beat in survey.after.heartbeats[:_MAX_ROWS]:
        host, pid = writer_of(beat.name)
        told, style = status(beat, survey)
        rows.append(
            [
                text(host),
                "-" if pid is None else f"{pid}",
                f'<span class="state {style}">{text(told)}</span>',
                f"<code>{text(beat.namespace)}</code>" if beat.namespace else "fskv prune --watch",
                iec(beat.written),
                f"{beat.full:,}",
            ]
        )
    if not rows:
        text_of_none = survey.after.unread or "no engine has a heartbeat in the root"
        return section("engines", "Engines", note(f"{text_of_none[0].upper()}{text_of_none[1:]}."))
    lease = survey.after.lease
    keeper = (
        f"{lease.host}, process {lease.pid}, holds the lease" if lease else "nobody holds the lease"
    )
    heads = ["host", ".process", "status", "namespace", ".written", ".disk full"]
    words = note(f"Who writes, from their heartbeats. Who counts and prunes: {keeper}.")
    return section("engines", "Engines", words, table("Engines", heads, rows))
