"""What every Millpond process shares: ids, outcomes, the wire, sessions, settings, sockets, logs.

Imports nothing of ours. Modules that open sockets, files or threads say so; all others are pure.
"""

__version__ = "0.1.0"
