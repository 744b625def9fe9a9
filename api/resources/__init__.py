"""One Falcon resource per route; all of them thin: read, ask, format."""
