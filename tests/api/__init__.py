"""The API: pure modules by themselves, the whole over real gunicorn against a scripted broker."""
