"""Models of Hugging Face's transformers that Megatron's GPTModel or BertModel computes exactly, in both directions.

Each family has a file with its table: names of weights, values that a class of transformers needs, config.json.
config.py reads and writes config.json by these tables, tensors.py converts weights.
"""
