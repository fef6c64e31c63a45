"""The version of fskv, and the versions of vLLM that it works with."""

__version__ = "0.1.0"
# Of vLLM: the version that all tests run with, and the oldest and the newest with which an engine was run.
# docs/vllm.md, "Versions", says what was run. tests/meta/test_docs.py holds the documents to these.
VLLM_TESTED = "0.32"
VLLM_OLDEST, VLLM_NEWEST = "0.32", "0.33"
