"""`make gpu`: what fskv does on a machine with a GPU, in three parts of at most 560 s, and one page of it.

`plan` lists the steps, `steps` runs each in a process of its own, `page` writes what was found. The other
modules are programs of steps. The machine needs no network and no vLLM: torch, pytest and a C compiler.
"""
