"""Engram for users of scikit-learn: a classifier and a regressor that keep learning, batch after batch."""

try:
    import sklearn  # noqa: F401 - checked here once, for one clear sentence
except ImportError as reason:
    raise ImportError("scikit-learn is not installed: pip install 'engram-cl[sklearn]'") from reason

from engram.sklearn.classifier import ContinualClassifier
from engram.sklearn.regressor import ContinualRegressor

__all__ = ["ContinualClassifier", "ContinualRegressor"]
