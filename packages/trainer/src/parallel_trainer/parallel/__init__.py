"""How a model is spread over ranks: one file, one idea."""
