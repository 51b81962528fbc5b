"""Real datasets, the streams of tasks made from them, and the batches of a task."""
