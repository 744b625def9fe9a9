"""Whole instances with real processes, started as a user starts them."""
