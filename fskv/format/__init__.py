"""The bytes of chunk files. docs/format.md is the contract."""
