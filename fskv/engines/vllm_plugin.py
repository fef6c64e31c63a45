"""The entry point that an installation names: a tree that is pulled without `pip install` keeps its name."""

from fskv.engines.vllm.plugin import register

__all__ = ["register"]
