"""Entry points and tools round the server.

Owns what a person or CI starts: the console script's commands, the demo model, the benches. May import any package of
Millpond; no package of Millpond may import it.
"""
