"""The demo: six peers train through loss, a freeze and a death, beside the runs to compare them with."""

from ragtag.app.demo.processes import DemoError, DemoPlan
from ragtag.app.demo.run import DemoResult, RoundTimes, Times, run_demo

__all__ = ["DemoError", "DemoResult", "DemoPlan", "RoundTimes", "Times", "run_demo"]
