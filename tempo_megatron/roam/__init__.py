"""Orders a training step's operations and places its tensors so that the step needs least memory, and runs it so.

The problem is that of ROAM (arXiv 2310.19295). `capture` makes a graph of a step that really runs, `order` finds the
order of least peak, `placement` the addresses in one arena, `execute` runs the ordered step, and `arena` runs it there.
"""
