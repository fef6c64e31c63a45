"""The reference pages of docs/ are those that the code makes today."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from test_docs import rows, text_of

from fskv.config import StoreConfig

reference = pytest.importorskip("docs.reference", reason="the command line is not installed")


def stale_pages() -> list[str]:
    return [path.name for path, text in reference.pages().items() if path.read_text() != text]


def test_every_page_is_current():
    assert stale_pages() == [], "run: make reference"


def test_negative_control_a_change_of_the_code_is_noticed(monkeypatch):
    # The name in that module alone: what is imported meanwhile makes its classes of the true fields.
    fewer = SimpleNamespace(
        fields=lambda cls: dataclasses.fields(cls)[:-1], MISSING=dataclasses.MISSING
    )
    monkeypatch.setattr(reference, "dataclasses", fewer)
    monkeypatch.setattr(reference.metrics, "ALL_METRICS", reference.metrics.ALL_METRICS[:-1])
    monkeypatch.setattr(reference.cli, "COMMANDS", reference.cli.COMMANDS[:-1])
    assert stale_pages() == ["options.md", "metrics.md", "cli.md"]


def test_the_defaults_of_the_page_are_those_of_the_code():
    table = rows(text_of("docs/options.md"), "option")
    assert list(table) == [field.name for field in dataclasses.fields(StoreConfig)]
    for name, (default, *_) in table.items():
        if default != "required":
            options = {"root": "/mnt/kv", name: json.loads(default.strip("`"))}
            assert StoreConfig.from_mapping(options) == StoreConfig(root="/mnt/kv"), name
