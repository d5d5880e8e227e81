"""Checkpoints on disk: written whole or not at all, named by a manifest of hashes, published, retired."""
