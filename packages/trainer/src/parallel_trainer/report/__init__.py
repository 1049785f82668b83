"""What a run shows and leaves behind: a line per step, metrics.jsonl, TensorBoard events, the loss curve."""
