"""What everything else stands on: errors, files, seeds."""
