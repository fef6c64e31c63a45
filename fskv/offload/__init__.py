"""What every engine stands on, free of any: `Lookup` beside its scheduler, `Mover` beside its KV pages.

`fskv.open` gives both (docs/engine.md).
"""
