"""`make gpu`: the first hour on a machine with a GPU, step by step, and one page about it.

`plan` lists the steps, `steps` runs each in a process of its own, `page` writes what was found. The other
modules are programs of steps. The runner itself needs nothing but Python's own library.
"""
