"""The generated pages of docs/ are those that the code makes today."""

from __future__ import annotations

import dataclasses
import json

import pytest
from places import REPOSITORY
from test_docs import rows

from fskv.config import StoreConfig

reference = pytest.importorskip("docs.reference", reason="the command line is not installed")


@pytest.mark.parametrize("name", list(reference.PAGES))
def test_a_generated_page_is_current(name):
    written = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert written == reference.PAGES[name](), "run: make reference"


def test_negative_control_a_changed_option_changes_its_page(monkeypatch):
    fields = list(dataclasses.fields(StoreConfig))
    monkeypatch.setattr(reference.dataclasses, "fields", lambda _: fields[:-1])
    assert fields[-1].name not in reference.options()


def test_the_defaults_of_the_page_are_those_of_the_code():
    table = rows(reference.options(), "option | default")
    assert list(table) == [field.name for field in dataclasses.fields(StoreConfig)]
    for name, (default, *_) in table.items():
        if default != "required":
            options = {"root": "/mnt/kv", name: json.loads(default.strip("`"))}
            assert StoreConfig.from_mapping(options) == StoreConfig(root="/mnt/kv"), name
