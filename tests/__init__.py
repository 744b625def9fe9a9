"""The tests mirror the tree; system/ starts real processes."""
