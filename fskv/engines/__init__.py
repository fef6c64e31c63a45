"""Adapters: each puts fskv.offload into an engine's words, and knows what its KV depends on."""
