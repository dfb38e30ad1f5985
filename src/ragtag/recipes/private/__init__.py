"""The survey of private distributed deep learning (arXiv 1812.03288): its table, measured."""
