"""Start N peers of one script on this machine, and see them through to their end."""

from ragtag.app.launch.loop import launch
from ragtag.app.launch.setup import LaunchError, OnError, check_launch, cores

__all__ = ["LaunchError", "OnError", "check_launch", "cores", "launch"]
