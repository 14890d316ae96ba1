"""`quiesce demo`: a small serving engine whose tensors travel by all three protocols."""
