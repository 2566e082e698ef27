"""The order of a training step's operations, and the addresses of its tensors, so that the step needs least memory.

The problem is that of ROAM (arXiv 2310.19295). `capture` makes a graph of a step that really runs, `order` finds the
order of least peak, `layout` the addresses in one arena, and `execute` runs the ordered step.
"""
