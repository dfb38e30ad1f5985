"""A lab of network namespaces on one machine: links with a rate, a queue, loss and delay, set where no sender
feels them. Linux, and root, only.

``Lab`` (lab.py) builds it: each peer's namespace hangs on a bridge in one more namespace. A datagram leaves
eth0 at once, waits in the hub for its sender's uplink (late*: a token bucket), then for the delay, where one
is asked for (relay.py), then for its receiver's downlink (port*: a token bucket, where incast meets a queue),
and is lost, if it is, as it comes in to the receiver's eth0 (nftables).
``probe`` (probe.py) measures rate, loss, bursts and delay of what came of it. ``python -m benchmarks.lab``
runs a command in each namespace.

``line`` needs no root and no namespace: a crew's paths over such links in virtual time, for rate control.
``drivers`` has whole drivers over these lines: nodes, queues, datagrams and all.
"""

from .lab import Counts, Lab, LabError, host_of, inner_host_of, why_not
from .probe import Probed, probe

__all__ = ["Counts", "Lab", "LabError", "Probed", "host_of", "inner_host_of", "probe", "why_not"]
