"""The HTTP side: Falcon under gunicorn. Knows the protocol and the prompt, never a model or capacity."""
