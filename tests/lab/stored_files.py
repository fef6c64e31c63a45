"""Files of chunks as tests of SGLang and LMCache spoil them, and the prompts whose KV is in them."""

from __future__ import annotations

import os
import pathlib

from places import REPOSITORY
from world import damage as flip

from faults import files

TEXT = (REPOSITORY / "LICENSE").read_text()
QUESTION = "\nQuestion: What is this text about?\nAnswer:"
PROMPT, OTHER = TEXT[:2600] + QUESTION, TEXT[2600:5200] + QUESTION


def chunk_files(root) -> list[pathlib.Path]:
    return sorted(pathlib.Path(root).glob("*/*/chunks/*/*.kv"))


def _swap(path, other):
    aside = path.with_suffix(".aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _directory(path, _):
    path.unlink()
    path.mkdir()


def _zeros_from_the_middle(path, _):
    nbytes = path.stat().st_size
    os.truncate(path, nbytes // 2)
    os.truncate(path, nbytes)


# By name: what is done to a file, beside which there is another one.
DAMAGES = {
    "a bit of the payload": lambda path, _: files.flip_payload_bit(str(path)),
    "the magic": lambda path, _: flip(path, 0, 0x10),
    "the header's fields": lambda path, _: flip(path, 40, 0x10),
    "a digest of a row": lambda path, _: flip(path, 300, 0x10),
    "a header that ends early": lambda path, _: os.truncate(path, 1000),
    "half of it is gone": lambda path, _: files.truncate(str(path)),
    "all of it is gone": lambda path, _: os.truncate(path, 0),
    "bytes behind its end": lambda path, _: os.truncate(path, path.stat().st_size + 4096),
    "zeros from the middle": _zeros_from_the_middle,
    "another chunk's file": _swap,
    "no file": lambda path, _: path.unlink(),
    "a directory": _directory,
}
