"""What a model is, in one place for all that build, train, measure or plan one.

shape.py holds the sizes and kinds of its parts, arguments.py Megatron-LM's names for them, build.py makes the modules.
Nothing here knows of training, DeepSpeed or the ledger.
"""
