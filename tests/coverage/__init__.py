"""Folds a tiny model of every architecture that Transformers can build, and checks that nothing changed."""
