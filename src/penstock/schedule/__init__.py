"""Schedules of a pipeline as data: built, lowered, proved, simulated and written without PyTorch."""
