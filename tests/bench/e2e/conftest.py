from tests.bench.e2e.tiny import tiny_shapes

__all__ = ["tiny_shapes"]
