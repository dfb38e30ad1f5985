"""Tasks that recipes train: ``digits``, ``images`` (CIFAR-10 by ``cifar``), ``texts``; ``sources``:
``--data``."""
