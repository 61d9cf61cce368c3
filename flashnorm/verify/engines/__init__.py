"""What the battery runs: anything that turns token ids into logits, under one description."""
