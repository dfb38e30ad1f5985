"""Which peer draws which samples: ``split`` is what a script iterates over, ``portion`` is behind it.

A pool of blocks is shared (``pool``, ``blocks``, ``deal``): peers claim blocks (``claims``, ``claiming``,
``lease``), use them, and report (``ledger``); ``drawing`` asks the pool over the notice board
(``answers``). ``loader`` makes batches, ``sizes`` their sizes by speed; ``epochs`` is the
epoch that the crew is in.
"""
