"""A run's report: one self-contained page, or its headline figures as a dictionary."""

from ragtag.app.report.build import build_report, report_json

__all__ = ["build_report", "report_json"]
