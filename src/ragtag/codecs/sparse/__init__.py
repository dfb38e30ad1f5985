"""Only some entries: which are chosen, how they are written, and what is not delivered is sent later.

Chosen: ``selection`` says what one is, ``selectors`` has them by name; ``topk`` (exact, SampledTopK,
random, chunked; ``topk_torch`` on a device), ``threshold`` (GaussianK, DGC, SIDCo), ``reused`` (a threshold
for several rounds), ``density`` how many. Written: ``wire`` (fragments that decode alone), ``pack``,
``indices`` (Rice codes); ``gather`` adds up what came. Error feedback: ``residual``, ``feedback``,
``tickets`` (what is under way), ``checkpoint``, ``options``. ``kernels`` and ``kernels_wire`` are the same
loops compiled; ``advice`` says whether sending fewer bytes pays.
"""
