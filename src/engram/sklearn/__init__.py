"""Engram for users of scikit-learn: a classifier that keeps learning, from batch to batch and task to task."""

try:
    import sklearn  # noqa: F401 - checked here once, for one clear sentence
except ImportError as reason:
    raise ImportError("scikit-learn is not installed: pip install 'engram-cl[sklearn]'") from reason

from engram.sklearn.classifier import ContinualClassifier

__all__ = ["ContinualClassifier"]
