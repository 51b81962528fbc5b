"""The plastic softmax layer, the heads it is compared with, and the paper's networks."""
