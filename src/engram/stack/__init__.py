"""Many models as one program: written for one, trained by the hundred."""
