"""Split learning (arXiv 1812.00564) beside federated averaging (arXiv 1909.09145, 1812.03288), measured."""
