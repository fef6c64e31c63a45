"""The bytes of chunk files, and the keys that seal them. docs/format.md is the contract."""
