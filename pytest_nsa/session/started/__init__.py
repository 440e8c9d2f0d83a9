"""Processes and jobs that tests start by themselves."""
