"""The decode step of a decoder-only transformer as one program: read from the model, proven, then run from a cache."""
