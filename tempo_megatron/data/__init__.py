"""From text to the token files that Megatron trains on: documents, tokenizer, `.bin` and `.idx`."""
