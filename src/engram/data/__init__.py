"""Datasets, the streams of tasks that are made from them, and the batches of a task."""
