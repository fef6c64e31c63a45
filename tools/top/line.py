"""Writes a `State` as the fields of a JSON line; `fskv top`'s LINES say what each of them means."""

from __future__ import annotations

from typing import Any

from fskv.observe import metrics

from .. import endpoint
from ..terminal import rfc3339
from .state import EndpointState, State


def fields(state: State) -> dict[str, Any]:
    space, lease, usage = state.space, state.lease, state.usage
    return {
        "at": rfc3339(state.at_ns),
        "root": state.path,
        "problem": state.problem,
        "no_answer_s": round(state.silent_s, 1),
        "nbytes": state.nbytes,
        "files": state.files,
        "growth": _round(state.growth),
        "stored": _round(state.stored),
        "pruned": _round(state.pruned),
        "free_nbytes": None if space is None else space.free_nbytes,
        "total_nbytes": None if space is None else space.total_nbytes,
        "counted_by": state.counted_by,
        "counted_at": rfc3339(state.counted_at_ms * 1_000_000) if state.counted_at_ms else None,
        "unlistable": state.unlistable,
        "unremovable": None if usage is None else usage.unremovable,
        "lease": None
        if lease is None
        else {
            "host": lease.host,
            "pid": lease.pid,
            "since": rfc3339(lease.since_ms * 1_000_000),
            "status": lease.status,
        },
        "bounds": [
            {
                "kind": scope.kind,
                "name": scope.name,
                "limit": scope.limit,
                "used": scope.used,
            }
            for scope in state.bounds
        ],
        "namespaces": [
            {
                "namespace": one.id,
                "tenant": one.tenant,
                "nbytes": one.nbytes,
                "files": one.files,
                "growth": _round(one.growth),
                "stored": _round(one.stored),
                "pruned_chunks": _round(one.pruned),
            }
            for one in state.namespaces
        ],
        "engines": [
            {
                "name": one.name,
                "host": one.host,
                "pid": one.pid,
                "namespace": one.namespace,
                "tenant": one.tenant,
                "written": one.written,
                "rate": _round(one.rate),
                "disk_full": one.full,
                "status": one.status,
            }
            for one in state.engines
        ],
        "endpoints": [_endpoint(one) for one in state.endpoints],
    }


def _endpoint(one: EndpointState) -> dict[str, Any]:
    recent, total = one.recent, one.total if one.is_up else None
    if not one.is_up:
        recent = None
    return {
        "url": one.url,
        "problem": one.problem,
        "no_answer_s": round(one.silent_s, 1),
        "models": list(one.models),
        "recent": None if recent is None else _change(recent),
        "total": None if total is None else _change(total),
        "breaker_open": None if total is None else bool(total.total(metrics.BREAKER_OPEN)),
        "threads_hung": None if total is None else int(total.total(metrics.THREADS_HUNG)),
        "stores_paused": None if total is None else bool(total.total(metrics.STORES_PAUSED)),
    }


def _change(change: endpoint.Change) -> dict[str, Any]:
    return {
        "seconds": round(change.seconds, 3) or None,
        "hits": int(change.total(metrics.LOOKUP_HITS)),
        "misses": _ints(change.by_label(metrics.LOOKUP_MISSES)),
        "token_hit_ratio": _round(change.token_hit_ratio),
        "loaded_nbytes": int(change.total(metrics.LOADED_BYTES)),
        "loaded_chunks": int(change.total(metrics.LOADED_CHUNKS)),
        "load_s": _round(change.load_s),
        "stored_nbytes": int(change.total(metrics.STORED_BYTES)),
        "load_failures": _ints(change.by_label(metrics.LOAD_FAILURES)),
        "stores_skipped": _ints(change.by_label(metrics.STORES_SKIPPED)),
        "lookup_p50_s": _round(change.quantile(endpoint.LOOKUP_DELAY, 0.5)),
        "lookup_p99_s": _round(change.quantile(endpoint.LOOKUP_DELAY, 0.99)),
        "ttft_p50_s": _round(change.quantile(endpoint.FIRST_TOKEN, 0.5)),
        "ttft_p99_s": _round(change.quantile(endpoint.FIRST_TOKEN, 0.99)),
    }


def _ints(table: dict[str, float]) -> dict[str, int]:
    return {label: int(amount) for label, amount in table.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
