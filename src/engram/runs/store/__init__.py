"""Many runs in one folder: found, listed, compared, exported."""
