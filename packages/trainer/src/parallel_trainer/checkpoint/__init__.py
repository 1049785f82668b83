"""Weights on disk: files of tensors read and written in pieces, and folders of other programs."""
