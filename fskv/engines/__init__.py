"""Adapters: each translates fskv.offload for one engine, and derives the identity of its KV."""
