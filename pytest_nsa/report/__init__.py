"""Verdicts for people: `text` (terminal), `summary` (SUMMARY.md), `html` (report.html)."""
