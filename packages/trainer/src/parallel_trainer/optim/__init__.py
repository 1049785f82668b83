"""Learning-rate schedules, weight decay rules, AdamW on flat shards, the global gradient norm."""
