"""Verdicts for people: `terminal`, `summary` (SUMMARY.md), `html` (report.html)."""
