"""The broker: admits, queues, routes, leases, relays. Never looks into a payload."""
