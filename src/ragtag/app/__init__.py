"""What binds all else together: the library's way in, and the command.

``join`` is ``ragtag.join``: into a ``crew``, or a crew on Ray (``on_ray``), as the ``environment`` says that
``launch`` or another launcher wrote, or by an ``invitation``. Peers write traces (``tracefile``), which
``terminal`` shows live and ``report`` shows later; ``words`` says figures and notes in English. ``cli`` is
the command; ``demo``, ``probe`` and ``experiment`` (what ``simulate`` runs) are the commands of these names.
"""
