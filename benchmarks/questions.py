"""Questions about documents as token ids of a real model: prompts that share a prefix."""

from __future__ import annotations

import json
import pathlib
import re

from benchmarks.rig import BenchmarkError

_DOCUMENTS = pathlib.Path(__file__).resolve().parents[1] / "docs"


class Documents:
    """The repository's documents, cut into pieces of equal length, and questions about their words."""

    def __init__(self, model: str, *, number: int, tokens: int) -> None:
        """`model` is a directory with tokenizer.json; raises BenchmarkError where that is missing."""
        from tokenizers import Tokenizer

        path = pathlib.Path(model, "tokenizer.json")
        if not path.is_file():
            raise BenchmarkError(
                f"{path} is not there: the option --model names a checkpoint's directory"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        text = "\n".join(
            path.read_text(encoding="utf-8") for path in sorted(_DOCUMENTS.glob("*.md"))
        )
        ids = self._tokenizer.encode(text).ids
        begin = self._tokenizer.encode("").ids  # what stands in front of any text
        config = json.loads(path.with_name("config.json").read_text())
        if not begin and config["model_type"].startswith("gemma"):
            begin = [
                config["bos_token_id"]
            ]  # it cannot do without, and not every tokenizer.json says so
        length = tokens - len(begin)
        if number * length > len(ids):
            raise BenchmarkError(
                f"the documents have {len(ids)} tokens, {number} x {tokens} were asked for"
            )
        self._pieces = [begin + ids[n * length : (n + 1) * length] for n in range(number)]
        self._words = [
            sorted(set(re.findall(r"[A-Za-z]{6,}", self._tokenizer.decode(piece))))
            for piece in self._pieces
        ]

    def prompt(self, document: int, question: int) -> list[int]:
        """Return a document with a question, as an instruction that the model is to answer."""
        words = self._words[document]
        word = words[question * 7 % len(words)]
        asked = f"\n\nQuestion {question}: what does this text say about {word}?\nAnswer:"
        return self._pieces[document] + self._tokenizer.encode(asked, add_special_tokens=False).ids
