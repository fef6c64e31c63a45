"""The bytes of chunk files, and where they lie in KV pages. docs/format.md is the contract."""
