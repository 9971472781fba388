"""Losses and output classes of patched models."""
