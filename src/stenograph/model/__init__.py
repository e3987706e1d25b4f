"""A model's files: tokenizers, tokenizer.json, the GGUF header, and how the files are found and fetched."""
